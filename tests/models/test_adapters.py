"""`adapter=lora`: what is trained, saved, resumed and exported is the adapters alone."""

import json

import hf_files
import pytest
import runs
import torch
from helpers import evaluations
from own_models import Normed
from safetensors.torch import load_file, save_file
from torch import nn

import trainapp
from trainapp.config.schema import Adapter
from trainapp.errors import UserError
from trainapp.models.adapters import add_lora, base_of, digest_of, exported_adapters, merge

transformers = pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
peft = pytest.importorskip("peft", reason="needs the extra trainapp[peft]")

TOKENS = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=16", "data.size=64", "data.val_size=16")
LORA = (*hf_files.CAUSAL, *TOKENS, "adapter=lora", "optimizer.lr=0.01", "schedule=constant")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model of Transformers."""
    return hf_files.model_folder(tmp_path_factory.mktemp("base") / "llama")


def on(base):
    """LoRA on the model of a folder."""
    return (*(o for o in LORA if not o.startswith("model.config")), f"model.path={base}")


@pytest.mark.slow
def test_the_adapters_alone_are_trained_and_saved(tmp_path):
    run = runs.prepare(tmp_path, *LORA)
    model = run.state.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    runs.loop.train(run)
    run.close()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert changed == trained == {name for name in before if "lora_" in name}
    assert len(trained) == 2 * 2 * 7  # of seven linear layers in each of two blocks
    saved = runs.saved(tmp_path, 4)
    assert set(saved["model"]) == trained
    assert {name.partition(".lora")[0] for name in saved["optimizer"]} == {n.partition(".lora")[0] for n in trained}
    assert len(saved["base"]) == 64
    assert base_of(model).names == set(before) - trained


@pytest.mark.slow
def test_another_base_is_refused(tmp_path, base):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    runs.run(tmp_path / "run", *on(copy))
    runs.run(tmp_path / "run", *on(copy), "train.max_steps=5")
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="it holds adapters, trained on another base model"):
        runs.run(tmp_path / "run", *on(copy), "train.max_steps=6")


@pytest.mark.slow
def test_an_export_is_opened_by_peft_and_merged_by_transformers(tmp_path, base):
    run = runs.run_until(tmp_path / "run", 4, *on(base))
    inputs = torch.arange(12)[None]
    wanted = outputs(run.state.model, inputs)
    export = ("mode=export", f"checkpointing.resume={tmp_path / 'run'}")  # the rest is the run's own
    runs.run(tmp_path / "small", *export)
    runs.run(tmp_path / "whole", *export, "export.merge=true")
    small, whole = tmp_path / "small/export", tmp_path / "whole/export"
    assert (small / "adapter_model.safetensors").stat().st_size < 0.5 * (whole / "model.safetensors").stat().st_size
    assert not (small / "model.safetensors").exists()
    assert json.loads((small / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    own = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = outputs(own, inputs)
    adapted = outputs(peft.PeftModel.from_pretrained(own, small), inputs)
    merged = outputs(transformers.AutoModelForCausalLM.from_pretrained(whole), inputs)
    torch.testing.assert_close(adapted, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, wanted, rtol=1e-4, atol=1e-5)
    assert (without - wanted).abs().max() > 1e-3


def test_a_base_in_bf16_has_adapters_in_fp32(tmp_path):
    run = runs.prepare(tmp_path, *LORA, "adapter.base_dtype=bf16", "precision=bf16")
    dtypes = {p.requires_grad: p.dtype for p in run.state.model.parameters()}
    runs.loop.train_step(run)
    run.close()
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.slow
def test_initial_weights_are_read_into_the_base(tmp_path):
    gpt = runs.MODELS["gpt"]
    runs.run(tmp_path / "run", *gpt)
    runs.run(tmp_path / "out", "mode=export", f"checkpointing.resume={tmp_path / 'run'}")
    weights = load_file(tmp_path / "out/export/model.safetensors")

    def base(*overrides):
        run = runs.prepare(tmp_path / f"lora{len(overrides)}", *gpt, "adapter=lora", *overrides)
        run.close()
        named = run.state.model.named_parameters()
        return {name.replace(".base_layer", ""): p.detach() for name, p in named if not p.requires_grad}

    assert runs.differences(base(f"model.init_from={tmp_path / 'out/export/model.safetensors'}"), weights) == []
    assert runs.differences(base(), weights) != []


@pytest.mark.slow
def test_another_run_begins_with_the_adapters_alone(tmp_path, base):
    first = runs.run_until(tmp_path / "run", 4, *on(base))
    adapters = first.state.tensors()["model"]
    weights = (f"model.init_from={tmp_path / 'run'}",)
    new = runs.prepare(tmp_path / "new", *on(base), *weights, "schedule=linear")
    new.close()
    assert new.state.progress.step == 0
    assert runs.differences(new.state.tensors()["model"], adapters) == []
    plain = tuple(o for o in on(base) if not o.startswith("adapter"))
    with pytest.raises(UserError, match="it holds only adapters, trained on a base"):
        runs.prepare(tmp_path / "plain", *plain, *weights)
    runs.run(tmp_path / "whole", *plain, "train.max_steps=1")
    with pytest.raises(UserError, match="it holds a whole model; use adapter=none"):
        runs.run(tmp_path / "whole", *on(base), "train.max_steps=2")
    other = hf_files.model_folder(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="adapters, trained on another base"):
        runs.prepare(tmp_path / "another", *on(other), *weights)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.targets=[q_prj]"], r"adapter=lora: Target modules .*q_prj"),
        (["adapter.train=[head]"], r"adapter\.train=\[head\]: LlamaForCausalLM has no module"),
        (["adapter.rank=0"], r"adapter\.rank=0: must be greater than 0"),
        (
            ["adapter.targets=[lm_head]", "memory.loss_chunk=4"],
            "the head of LlamaForCausalLM must be",
        ),
    ],
)
def test_a_mistake_gets_one_message(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        runs.prepare(tmp_path, *LORA, *overrides)


def test_peft_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UserError, match=r"adapter=lora: needs peft, .*pip install 'trainapp\[peft\]'"):
        runs.prepare(tmp_path, *LORA)


def test_a_merge_leaves_a_tied_layer_as_it_was():
    """The embedding shares the weight of the output layer, beside which adapters were trained."""
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **hf_files.SIZES)
    model = transformers.LlamaForCausalLM(config)
    add_lora(model, Adapter(kind="lora", targets=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.eval()
    tokens = torch.arange(8)[None]
    before = model(tokens).logits
    merge(model)
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


NORMED = (
    *("model=mlp", "model._target_=own_models.Normed", "~model.width", "~model.depth", "~model.dropout"),
    *("user_packages=[own_models]", "data=digits", "optimizer.lr=0.05"),
)
IMAGES = torch.linspace(-1, 1, 4 * 64).view(4, 1, 8, 8)


def outputs(model, inputs=IMAGES):
    with torch.no_grad():
        found = model.eval()(inputs)
    return getattr(found, "logits", found)


def test_an_export_has_the_statistics_of_a_batchnorm_that_is_trained(tmp_path):
    base = runs.prepare(tmp_path / "base", *NORMED)
    base.close()
    run = runs.run_until(tmp_path / "run", 4, *NORMED, "adapter=lora", "adapter.train=[body.1]")
    runs.run(tmp_path / "out", "mode=export", f"checkpointing.resume={tmp_path / 'run'}", "user_packages=[own_models]")
    untrained = outputs(base.state.model)
    loaded = outputs(peft.PeftModel.from_pretrained(base.state.model, tmp_path / "out/export"))
    torch.testing.assert_close(loaded, outputs(run.state.model), rtol=1e-5, atol=1e-5)
    assert (loaded - untrained).abs().max() > 1e-2


def test_what_else_training_changed_beside_the_adapters_is_exported_merged_only(tmp_path, caplog):
    """Statistics of BatchNorm and counts, which peft would take from the base."""
    counts = (*NORMED, "+model.counts=true")
    run = runs.run_until(tmp_path / "run", 4, *counts, "adapter=lora")
    wanted = outputs(run.state.model)
    export = ("mode=export", f"checkpointing.resume={tmp_path / 'run'}", "user_packages=[own_models]")
    runs.run(tmp_path / "out", *export)
    assert "running_mean" in caplog.text
    runs.run(tmp_path / "whole", *export, "export.merge=true")
    weights = load_file(tmp_path / "whole/export/model.safetensors")
    model = Normed(10, counts=True)
    model.load_state_dict(weights)
    assert weights["seen"] == 4
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_base_in_bf16_is_merged_in_fp32(tmp_path, base):
    """The control: rounded to bf16, if that is asked for, outputs differ."""
    few = ("optimizer.lr=0.003", "adapter.base_dtype=bf16", "precision=bf16")
    runs.run(tmp_path / "run", *on(base), *few)
    tokens = torch.arange(12)[None]
    wanted = outputs(trainapp.load(tmp_path / "run", which="last"), tokens)
    found = {}
    kinds = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    for dtype in kinds:
        merged = ("mode=export", f"checkpointing.resume={tmp_path / 'run'}", "export.merge=true")
        runs.run(tmp_path / dtype, *merged, f"export.merge_dtype={dtype}")
        saved = load_file(tmp_path / dtype / "export/model.safetensors")
        assert {str(tensor.dtype) for tensor in saved.values()} == {kinds[dtype]}
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype / "export", dtype=torch.float32)
        found[dtype] = float((outputs(model, tokens) - wanted).abs().max() / wanted.std())
    assert found["fp32"] < 1e-5
    assert found["bf16"] > 1e-3


@pytest.mark.slow
def test_new_layers_are_trained(tmp_path):
    """BERT's pooler, which a language model comes without: peft would draw another one when it opens the export."""
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=400, **hf_files.SIZES))
    bert.save_pretrained(hf_files.tokenizer_folder(tmp_path / "bert"))
    files = hf_files.texts(tmp_path / "texts.jsonl")
    overrides = ("model=hf", "model.task=sequence_classification", f"model.path={tmp_path / 'bert'}", "adapter=lora")
    overrides = (*overrides, "data=hf", f"data.path={files}", "data.label=label")
    run = runs.prepare(tmp_path / "run", *overrides)
    run.close()
    trained = {name for name, p in run.state.model.named_parameters() if p.requires_grad}
    assert "bert.pooler.dense.modules_to_save.default.weight" in trained
    assert "classifier.modules_to_save.default.weight" in trained


def test_an_export_of_tied_weights_has_the_adapters_alone(caplog):
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **hf_files.SIZES)
    model = transformers.LlamaForCausalLM(config)
    add_lora(model, Adapter(kind="lora"))
    tensors, settings = exported_adapters(model)
    assert len(tensors) == 2 * 2 * 7
    assert all("lora_" in name for name in tensors)
    assert not settings.modules_to_save
    assert not caplog.text
    model.model.norm.weight.requires_grad_(True)  # by code of a user's own
    exported_adapters(model)
    assert "model.norm.weight" in caplog.text


# A base that forwards write


class Codebook(nn.Module):
    """A moving average of the features, in a parameter without gradient."""

    def __init__(self, num_classes, width: int = 8):
        super().__init__()
        self.inside = nn.Linear(64, width)
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)
        self.code = nn.Parameter(torch.zeros(width), requires_grad=False)

    def blocks(self):
        return [self.block]

    def forward(self, inputs):
        features = self.block(self.inside(inputs.flatten(1)).relu())
        if self.training:
            with torch.no_grad():
                self.code.mul_(0.9).add_(features.detach().mean(0), alpha=0.1)
        return self.head(features - self.code)


CODEBOOK = (
    "model._target_=test_adapters.Codebook",
    "user_packages=[test_adapters]",
    "data=digits",
    "task=classification",
    "adapter=lora",
    "optimizer.lr=0.05",
    "schedule=constant",
    "batch.micro_size=16",
    "every.eval=2",
)


@pytest.mark.slow
def test_what_forwards_write_of_the_base_is_saved(tmp_path):
    whole, parts = runs.resumed(tmp_path, 2, *CODEBOOK)
    assert runs.differences(whole, parts) == []
    assert {name for name in whole["model"] if "lora_" not in name} == {"code"}
    assert whole["model_values"]["written"] == ["code"]
    assert runs.saved(tmp_path / "parts", 2)["model"]["code"].abs().max() > 0
    assert evaluations(tmp_path / "whole")[-1]["loss"] == evaluations(tmp_path / "parts")[-1]["loss"]


@pytest.mark.slow
def test_what_forwards_wrote_is_loaded_and_exported(tmp_path, caplog):
    runs.run(tmp_path / "run", *CODEBOOK)
    code = runs.saved(tmp_path / "run", 4)["model"]["code"]
    of_run = (f"checkpointing.resume={tmp_path / 'run'}", *CODEBOOK)
    loaded = trainapp.load(str(tmp_path / "run"), which="last", user_packages=["test_adapters"])
    assert torch.equal(loaded.state_dict()["code"], code)
    evaluated = runs.run(tmp_path / "eval", *of_run, "mode=eval")
    assert evaluated.evaluation["loss"] == evaluations(tmp_path / "run")[-1]["loss"]
    new = runs.prepare(tmp_path / "new", *CODEBOOK, f"model.init_from={tmp_path / 'run'}")
    new.close()
    assert torch.equal(new.state.model.code, code)
    assert "inside.weight" in base_of(new.state.model).names  # of the base, and not in the checkpoint
    runs.run(tmp_path / "small", *of_run, "mode=export")
    assert "for code, peft uses the base's values" in caplog.text
    runs.run(tmp_path / "merged", *of_run, "mode=export", "export.merge=true")
    assert torch.equal(load_file(tmp_path / "merged/export/model.safetensors")["code"], code)


def test_the_digest_of_a_base_stays_as_checkpoints_have_it():
    """Of format 3: with another digest, no run with adapters could resume."""
    base = {"a": torch.arange(129.0), "b": torch.arange(37).to(torch.bfloat16)}
    assert digest_of(base) == "70ad58251810b7841b723546e7e924db7f8fa0121f2e82e0ce1301ecc5af567c"


@pytest.mark.slow
def test_adapters_of_another_rank_are_named_by_their_setting(tmp_path):
    """`adapter=lora` on the command line resets the rank to the option's."""
    runs.run(tmp_path / "run", *LORA, "adapter.rank=4", "train.max_steps=1")
    of_run = (*TOKENS, f"checkpointing.resume={tmp_path / 'run'}", "mode=eval")
    message = runs.refusal(tmp_path / "eval", *of_run, "adapter=lora")
    assert message.startswith("adapter.rank=8: the run in ")
    assert "has adapter.rank=4" in message
    assert runs.run(tmp_path / "again", *of_run, "adapter=lora", "adapter.rank=4").evaluation["loss"] > 0
