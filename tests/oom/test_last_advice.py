"""The advice with which a run ends: it is about what filled memory in the phase that failed, and saves what it says."""

import dataclasses
import re

import hf_files
import pytest
import runs
from faults import Fault
from harness import Recorded

from trainapp.errors import TrainingStopped
from trainapp.memory.live_tensors import Category, MemoryLimitExceeded
from trainapp.oom.messages import final_message
from trainapp.oom.report import describe
from trainapp.units import parse_memory_size

from .conftest import peak_of, tiny

GPT = (*runs.MODELS["gpt"], "every.eval=2")
OF_THE_FORWARD = ("precision=bf16", "activation_checkpointing", "memory.")
LARGE_LLAMA = hf_files.LLAMA.replace("hidden_size: 32", "hidden_size: 256").replace("size: 48", "size: 512")
TOKENS = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=16", "data.size=64", "data.val_size=16")
WHOLE = ("model=hf", "model.task=causal_lm", LARGE_LLAMA, *TOKENS, "train.ema=null", "batch.global_size=8")
LORA = (*WHOLE, "adapter=lora")
# At one sample per micro-batch, weights or what the optimizer's step needs exceed the activations.
FEW_TOKENS = ("model=gpt", "data=synthetic_tokens", "data.context_length=32", "data.size=64", "batch.global_size=8")
WIDE = (*FEW_TOKENS, "model.depth=4", "model.width=384", "data.vocab_size=200", "train.ema=null")
WORDS = (*FEW_TOKENS, "model.depth=2", "model.width=64", "data.vocab_size=4000", "train.ema=null")
AVERAGED = (*FEW_TOKENS, "model.depth=3", "model.width=128", "data.vocab_size=200")
LINE = re.compile(r"^  (\S+=.+?): saves up to (\S+ \S+) \(.+\); costs .+$", re.MULTILINE)


def advice(run_dir, *overrides, faults=(), **changes) -> dict[str, int]:
    """The bytes by setting, in the order of the last message."""
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(run_dir, *overrides, "oom.techniques=none", changes=changes), *faults)
    lines = str(caught.value).partition("Settings that save memory, best first")[2].splitlines()[1:-1]
    found = {}
    for line in lines:
        setting, size = LINE.fullmatch(line).groups()
        found[setting] = parse_memory_size(size.replace(" ", ""), 0)
    assert len(found) == len(lines) <= 5
    return found


def test_a_commit_is_not_helped_by_techniques_of_the_forward(tmp_path):
    deeper = "model.depth=3"  # with one block, the step of AdamW in fewer bits needs more than it saves
    found = advice(tmp_path, *GPT, deeper, "batch.micro_size=1", faults=[Fault("commit", 2, times=9)])
    assert next(iter(found)) == "optimizer=adamw_bf16"
    assert not any(setting.startswith(OF_THE_FORWARD) for setting in found)


def test_an_evaluation_is_helped_by_what_it_does_itself(tmp_path):
    """The forward that fails asks for 20 MiB, more than all that is in memory."""
    changes = {"batch.eval_micro_size": "auto"}
    found = advice(tmp_path, *GPT, faults=[Fault("evaluate", 2, above=0)], **changes)
    assert next(iter(found)) == "precision=bf16"
    assert not any(setting.startswith(("activation_checkpointing", "optimizer.in_backward")) for setting in found)


def test_what_is_missing_is_of_what_the_limit_bounds(tmp_path):
    """On a GPU other processes' memory is in the table, but not below the allocator's cap."""
    run = runs.closed(tmp_path, *runs.MODELS["mlp"])
    error = MemoryLimitExceeded("aten.mm", 300, 900, 1000)
    failure = describe(run, error)
    failure.by_category[Category.OUTSIDE_ALLOCATOR] = 2**30
    message = final_message(run, dataclasses.replace(failure, limit=1000), 1, is_constant=False)
    assert "Settings that save memory, best first; at least 200 B are missing (add mode=plan " in message
    enough = dataclasses.replace(failure, limit=1200)
    assert "Settings that save memory, best first (add" in final_message(run, enough, 1, is_constant=False)


def needs_adapters():
    pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")


@pytest.mark.slow
def test_an_adapters_base_in_fp32_is_named_first_and_saves_what_is_said(tmp_path):
    needs_adapters()
    peak = peak_of(tmp_path / "peak", LORA, 1)
    limited = {"batch.micro_size": "auto", "memory.limit": int(0.97 * peak)}
    found = advice(tmp_path / "run", *LORA, **limited)
    setting = "adapter.base_dtype=bf16 precision=bf16"
    assert next(iter(found)) == setting
    saved = peak - peak_of(tmp_path / "saved", (*LORA, *setting.split()), 1)
    assert saved == pytest.approx(found[setting], rel=0.1)
    optimizers = [name.startswith("optimizer=") for name in found]
    assert sum(optimizers) <= 2


@pytest.mark.slow
def test_adapters_are_advised_where_gradients_and_state_fill_memory_and_save_what_is_said(tmp_path):
    needs_adapters()
    peak = peak_of(tmp_path / "peak", WHOLE, 1)
    limited = {"batch.micro_size": "auto", "memory.limit": int(0.97 * peak)}
    found = advice(tmp_path / "run", *WHOLE, **limited)
    saved = peak - peak_of(tmp_path / "saved", LORA, 1)
    assert saved == pytest.approx(found["adapter=lora"], rel=0.1)


@pytest.mark.slow
def test_an_adapters_base_in_bf16_also_saves_its_copies(tmp_path):
    needs_adapters()
    lora = (*LORA, "precision=bf16")
    peak = peak_of(tmp_path / "peak", lora, 1)
    limited = {"batch.micro_size": 1, "memory.limit": int(0.97 * peak)}
    found = advice(tmp_path / "run", *lora, **limited)
    setting = "adapter.base_dtype=bf16"
    assert next(iter(found)) == setting
    saved = peak - peak_of(tmp_path / "saved", (*lora, setting), 1)
    assert saved == pytest.approx(found[setting], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "advised", "needs_more"),
    [
        (WIDE, ["precision=bf16_pure optimizer=adamw_bf16", "optimizer=adamw_4bit"], ["precision=bf16"]),
        ((*WIDE, "precision=bf16"), ["precision=bf16_pure optimizer=adamw_bf16", "optimizer=adamw_4bit"], []),
        (
            WORDS,
            ["precision=bf16_pure optimizer=adamw_bf16"],
            ["optimizer=adamw_bf16", "optimizer=adamw_8bit", "optimizer=adamw_4bit"],
        ),
        (AVERAGED, ["optimizer=adamw_4bit"], ["precision=bf16"]),
    ],
    ids=["wide", "wide in bf16", "words", "averaged"],
)
def test_what_needs_more_memory_is_not_advised_and_the_rest_saves_what_is_said(
    tmp_path, overrides, advised, needs_more
):
    peak = peak_of(tmp_path / "peak", overrides, 1)
    limited = {"batch.micro_size": 1, "memory.limit": int(0.99 * peak)}
    found = advice(tmp_path / "run", *overrides, **limited)
    for number, setting in enumerate(advised):
        saved = peak - peak_of(tmp_path / f"advised {number}", (*overrides, *setting.split()), 1)
        assert found[setting] == pytest.approx(saved, rel=0.1), setting
    for number, setting in enumerate(needs_more):
        assert peak_of(tmp_path / f"worse {number}", (*overrides, *setting.split()), 1) > peak
        assert setting not in found
