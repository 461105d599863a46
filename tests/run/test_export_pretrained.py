"""The commands of docs/huggingface.md as a user types them, and what Transformers and peft open afterwards."""

import json

import hf_files
import pytest
import torch
from helpers import metrics, run_cli
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
pytestmark = pytest.mark.timeout(600)
FEW = ("train.max_steps=3", "every.log=1", "train.device=cpu", "memory.guard=false")
CONFIG = (
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
    "num_attention_heads: 4, vocab_size: 256}"
)


def cli(tmp_path, *overrides):
    done = run_cli(*overrides, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_a_llama_on_text_is_exported_for_transformers(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    run = ("model=hf", "model.task=causal_lm", CONFIG, "data=text", "data.files=a.txt", *FEW)
    cli(tmp_path, *run, "hydra.run.dir=run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert 5 < losses[0] < 6.5  # the logarithm of 256 is 5.5
    assert losses[-1] < losses[0]
    cli(tmp_path, "mode=export", "checkpointing.resume=run", "hydra.run.dir=out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/export")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.use_cache is True
    data = torch.tensor([list(b"the quick brown fox jumps over")])
    with torch.no_grad():
        loss = model(data, labels=data).loss
    assert float(loss) < losses[0]


@pytest.mark.slow
def test_lora_on_answers_within_a_limit_is_exported_for_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    hf_files.model_folder(tmp_path / "FOLDER")
    hf_files.examples(tmp_path / "chat.jsonl")
    run = (
        *("model=hf", "model.task=causal_lm", "model.path=FOLDER", "data=sft", "data.files=chat.jsonl"),
        *("data.pack=true", "adapter=lora", "precision=bf16", "memory.limit=2GiB", "train.device=cpu"),
    )
    cli(tmp_path, *run, *FEW[:2], "data.context_length=64", "hydra.run.dir=run")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    cli(tmp_path, "mode=export", "checkpointing.resume=run", "hydra.run.dir=out")
    folder = tmp_path / "out/export"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(["the fox", "the quick brown fox"], padding=True)["attention_mask"][0][-1] == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "FOLDER")
    model = peft.PeftModel.from_pretrained(base, folder)
    assert isinstance(model, peft.PeftModelForCausalLM)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8


def exported(tmp_path, name, *overrides):
    """The losses of a run with adapters, and what its export has of them."""
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    run = (*hf_files.CAUSAL, "data=text", "data.files=a.txt", "data.context_length=32", "adapter=lora", *FEW)
    cli(tmp_path, *run, *overrides, f"hydra.run.dir={name}")
    cli(tmp_path, "mode=export", f"checkpointing.resume={name}", f"hydra.run.dir={name}_out")
    losses = [line["loss"] for line in metrics(tmp_path / name)]
    return losses, load_file(tmp_path / f"{name}_out/export/adapter_model.safetensors")


BF16 = ("adapter.base_dtype=bf16", "precision=bf16")  # shards of two dtypes
ON_TWO = [
    pytest.param("fsdp", (), 1e-5, marks=pytest.mark.nightly),
    ("fsdp", BF16, 2e-2),
    pytest.param("ddp", (), 1e-5, marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "more", "within"), ON_TWO)
def test_adapters_on_two_ranks_are_those_of_one(tmp_path, strategy, more, within):
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    alone, one = exported(tmp_path, "one", *more)
    together, two = exported(tmp_path, "two", f"parallel={strategy}", "parallel.devices=2", *more)
    assert together == pytest.approx(alone, rel=within)
    assert one.keys() == two.keys()
    for name, tensor in one.items() if not more else ():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
