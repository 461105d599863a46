import os
import pickle

import pytest
import runs
import safetensors.torch
import torch
from torch import nn
from writing_models import ActNorm

from trainapp.errors import UserError
from trainapp.models.gpt import GPT
from trainapp.models.mlp import MLP
from trainapp.models.resnet import ResNet
from trainapp.models.weights import load_weights


def resnet(num_classes=10, **settings) -> ResNet:
    return ResNet((1, 8, 8), num_classes, width=4, **settings)


def save(state, path):
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path


def assert_same(model: nn.Module, other: nn.Module):
    assert runs.differences(model.state_dict(), other.state_dict()) == []


def refusal(model, path, **options) -> str:
    """The message of a refused load; asserts that the model is unchanged after it."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, path, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    message = str(caught.value)
    assert message.startswith(f"model.init_from={path}: ")
    assert message.count("model.init_from=") == 1
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_round_trip_is_bitwise(tmp_path, name):
    source, target = resnet(), resnet()
    source(torch.randn(4, 1, 8, 8))  # so that the running statistics differ too
    assert not torch.equal(source.bn1.running_mean, target.bn1.running_mean)
    path = save(source.state_dict(), tmp_path / name)
    assert load_weights(target, path) == []
    assert_same(target, source)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": s, "epoch": 3},
        lambda s: {"state_dict": s, "optimizer": {"lr": 0.1}},
        lambda s: {"module." + k: v for k, v in s.items()},
        lambda s: {"_orig_mod." + k: v for k, v in s.items()},
        lambda s: {"model": {"_orig_mod.module." + k: v for k, v in s.items()}},
        lambda s: {"module._orig_mod." + k: v for k, v in s.items()},
        lambda s: {k: v for k, v in s.items() if "num_batches_tracked" not in k},
    ],
)
def test_wrapped_and_old_files_load(tmp_path, wrap):
    source, target = resnet(), resnet()
    assert load_weights(target, save(wrap(source.state_dict()), tmp_path / "w.pt")) == []
    assert_same(target, source)


def test_a_prefix_that_is_the_models_own_stays(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 2)

    source, target = Wrapper(), Wrapper()
    assert load_weights(target, save(source.state_dict(), tmp_path / "w.pt")) == []
    assert_same(target, source)


def test_tied_weights_load_once_from_safetensors(tmp_path):
    source, target = (GPT(vocab_size=20, context_length=8, depth=1, width=16) for _ in range(2))
    safetensors.torch.save_model(source, tmp_path / "w.safetensors")  # keeps one of the two names
    assert load_weights(target, tmp_path / "w.safetensors") == []
    assert_same(target, source)
    assert target.head.weight is target.embedding.weight


def test_untied_weights_do_not_fit_a_tied_model(tmp_path, caplog):
    source = GPT(vocab_size=20, context_length=8, depth=1, width=16, tie_embeddings=False)
    target = GPT(vocab_size=20, context_length=8, depth=1, width=16)
    path = save(source.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="1 tied in the model, but not equal in the file"):
        load_weights(target, path)
    assert load_weights(target, path, strict=False) == ["head.weight"]
    assert torch.equal(target.embedding.weight, source.embedding.weight)


def test_everything_that_does_not_fit_is_in_one_message(tmp_path):
    state = resnet().state_dict()
    for name in ("conv1.weight", "bn1.bias", "fc.bias", "layer1.0.conv1.weight"):
        del state[name]
    state["extra"] = torch.zeros(1)
    state["layer2.0.conv1.weight"] = torch.zeros(3, 4)
    message = refusal(resnet(), save(state, tmp_path / "w.pt"))
    assert "4 missing (conv1.weight, bn1.bias, layer1.0.conv1.weight and 1 more)" in message
    assert "1 not in the model (extra)" in message
    assert "1 of another shape (layer2.0.conv1.weight: [3, 4], not [8, 4, 3, 3])" in message
    assert "model.init_strict=false" in message


def test_not_strict_loads_the_rest_and_names_what_it_skipped(tmp_path):
    source, target = resnet(num_classes=7), resnet()
    head = target.fc.weight.clone()
    state = source.state_dict()
    del state["bn1.bias"]
    path = save(state, tmp_path / "w.pt")
    assert load_weights(target, path, strict=False) == ["bn1.bias", "fc.weight", "fc.bias"]
    assert torch.equal(target.fc.weight, head)
    assert torch.equal(target.layer4[1].conv2.weight, source.layer4[1].conv2.weight)


def test_another_architecture_is_refused_even_when_not_strict(tmp_path):
    path = save(MLP((1, 8, 8), 10).state_dict(), tmp_path / "w.pt")
    assert "do not fit the model: 102 missing (conv1.weight" in refusal(resnet(), path, strict=False)
    wider = save(MLP((1, 8, 8), 10, width=16, depth=2).state_dict(), tmp_path / "wider.pt")
    message = refusal(MLP((1, 9, 9), 9, width=8, depth=2), wider, strict=False)
    assert "4 of another shape" in message
    assert "init_strict" not in message  # it would load nothing


def test_a_part_of_a_larger_model(tmp_path):
    """As from a pretraining to a linear probe: another head, and the rest of the larger model is ignored."""
    source, target = resnet(num_classes=7), resnet()
    larger = nn.ModuleDict({"encoder_q": source, "encoder_k": resnet(num_classes=7)})
    path = save(
        {"state_dict": {f"module.{name}": value for name, value in larger.state_dict().items()}}, tmp_path / "w.pt"
    )
    message = refusal(target, path, strict=False)
    assert "or set model.init_prefix=encoder_q to load that part" in message
    message = refusal(target, path, prefix="encoder_q")
    assert "model.init_prefix=encoder_q: the weights do not fit the model: 2 of another shape (fc.weight" in message
    assert load_weights(target, path, strict=False, prefix="encoder_q") == ["fc.weight", "fc.bias"]
    assert torch.equal(target.conv1.weight, source.conv1.weight)
    assert load_weights(resnet(num_classes=7), path, prefix="encoder_k.") == []


def test_files_that_are_not_there(tmp_path):
    assert "there is no such file" in refusal(resnet(), tmp_path / "none.pt")
    assert "the folder has 0 models" in refusal(resnet(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert "cannot be read as weights" in refusal(resnet(), tmp_path)
    index.write_text('{"weight_map": {"a": "../../model-00001.safetensors"}}')
    assert "cannot be read as weights (FileNotFoundError: " in refusal(resnet(), index)
    (tmp_path / "model.safetensors").touch()
    assert "the folder has 2 models" in refusal(resnet(), tmp_path)


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("form", ["torch", "torch_legacy", "pickle", "safetensors"])
def test_a_planted_payload_is_refused_and_does_not_run(tmp_path, form):
    planted, path = tmp_path / "planted", tmp_path / "w.pt"
    state = {"fc.weight": Payload(planted)}
    if form.startswith("torch"):
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
        with pytest.raises(FileNotFoundError):  # negative control: the payload does run
            torch.load(save({"x": Payload(planted / "a" / "b")}, tmp_path / "live.pt"), weights_only=False)
    else:
        path = path if form == "pickle" else tmp_path / "w.safetensors"
        path.write_bytes(pickle.dumps(state, protocol=2))
    message = refusal(resnet(), path)
    assert "cannot be read as weights" in message
    assert not planted.exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("damage", [b"", b"hello world\n", None])
def test_damaged_files_are_refused(tmp_path, name, damage):
    path = save(resnet().state_dict(), tmp_path / name)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert "cannot be read as weights" in refusal(resnet(), path)


def test_files_without_weights_are_refused(tmp_path):
    assert "holds a Tensor" in refusal(resnet(), save(torch.zeros(3), tmp_path / "w.pt"))
    assert "do not fit the model" in refusal(resnet(), save({"epoch": 3}, tmp_path / "w.pt"))


def test_the_checks_see_the_loaded_weights(tmp_path):
    """The forward of a model that initialises itself from its first batch writes parameters only before that."""
    settings = (*runs.TINY, "data=digits", "user_packages=[writing_models]", *runs.own_model("writing_models.ActNorm"))
    fresh = runs.closed(tmp_path / "fresh", *settings)
    assert fresh.checks["loss in training"].startswith("not compared: the forward writes state (model.shift")
    state = ActNorm(num_classes=10).state_dict()
    state["is_initialised"].fill_(True)
    torch.save(state, tmp_path / "started.pt")
    started = runs.closed(tmp_path / "started", *settings, f"model.init_from={tmp_path / 'started.pt'}")
    assert started.checks["loss in training"].startswith("adds up over 4 samples")
