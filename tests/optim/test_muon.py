import pytest
import runs
import torch
from torch import nn

from trainapp.errors import UserError
from trainapp.models.gpt import GPT
from trainapp.optim.muon import Muon
from trainapp.optim.optimizers import materialise_state


def gpt(tied=True):
    torch.manual_seed(0)
    return GPT(vocab_size=32, context_length=8, depth=1, width=16, heads=2, tie_embeddings=tied)


def names(model, group):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {by_id[id(p)] for p in group["params"]}


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_a_matrix(tied):
    model = gpt(tied)
    matrices, others, plain = Muon.parameter_groups(model, 0.1)
    layers = ("attention.qkv", "attention.output", "mlp.gate", "mlp.up", "mlp.down")
    assert names(model, matrices) == {f"layers.0.{name}.weight" for name in layers}
    assert names(model, others) == {"embedding.weight"} | (set() if tied else {"head.weight"})
    assert names(model, plain) == {"layers.0.attention_norm.weight", "layers.0.mlp_norm.weight", "norm.weight"}
    assert [group["weight_decay"] for group in (matrices, others, plain)] == [0.1, 0.1, 0.0]


def test_a_convolution_is_none():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4))
    matrices, others, _ = Muon.parameter_groups(model, 0.1)
    assert (names(model, matrices), names(model, others)) == ({"2.weight"}, {"0.weight"})


def trained(model, *optimizers):
    torch.manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(32, (4, 8))
        for p in model.parameters():
            p.grad = None
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return runs.weights(model)


@pytest.mark.parametrize("beforehand", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_it_is_torchs_muon_and_torchs_adamw(fused, beforehand):
    model, other = gpt(), gpt()
    own = Muon(Muon.parameter_groups(model, 0.1), lr=0.01, fused=fused)
    if beforehand:
        materialise_state(own)
        assert own.state
        assert torch.equal(runs.weights(model), runs.weights(other))
    matrices, *rest = Muon.parameter_groups(other, 0.1)
    muon = torch.optim.Muon(matrices["params"], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, fused=fused)
    expected = trained(other, muon, adamw)
    assert torch.equal(trained(model, own), expected)
    assert len(own.state) == len(list(model.parameters()))
    # Negative control: all by AdamW.
    alone = gpt()
    assert not torch.equal(trained(alone, torch.optim.AdamW(alone.parameters(), lr=0.01)), expected)


def test_without_a_matrix_it_is_refused(tmp_path):
    with pytest.raises(UserError) as refused:
        runs.prepare(tmp_path, "model=mlp", "model.depth=1", "data=digits", "optimizer=muon")
    assert str(refused.value) == "optimizer=muon: the model has no hidden matrix; use optimizer=adamw"
