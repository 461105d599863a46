"""With a technique in force, an out-of-memory error costs one retried step: bit for bit the replay of the schedule."""

from importlib.util import find_spec

import pytest
import runs
from faults import Fault
from harness import Recorded

from trainapp.techniques import catalogue

from .conftest import peak_of, tiny, undisturbed

# Dropout: a step cut in another way has other bits.
GPT = (*runs.MODELS["gpt"], "data.min_length=12")
LARGE = ("model.width=64", "data.vocab_size=128")  # enough to be quantized
# What a technique of the catalogue needs beside its setting.
BESIDE = {
    "precision=bf16_pure optimizer=adamw_bf16": ("train.ema=null",),
    "optimizer=adamw_8bit": LARGE,
    "optimizer=adamw_4bit": LARGE,
    "optimizer.in_backward=true": ("train.grad_clip=null",),
}
ELSEWHERE = {
    "activation_checkpointing=auto": "a decision before the run: planning/test_decisions.py",
    "adapter=lora": "needs an extra: models/test_adapters.py",
    "adapter.base_dtype=bf16": "needs an extra: models/test_adapters.py",
    "adapter.base_dtype=bf16 precision=bf16": "needs an extra: models/test_adapters.py",
    "parallel=fsdp": "several ranks: parallel/",
    "parallel.fsdp.cpu_offload=true": "several ranks: parallel/",
    "parallel.fsdp.meta_init=true": "several ranks: parallel/",
}
TECHNIQUES = {
    "loss in chunks": ("memory.loss_chunk=5",),
    "loss in chunks, bf16": ("memory.loss_chunk=5", "precision=bf16"),
    "loss in chunks, checkpointing": ("memory.loss_chunk=5", "activation_checkpointing=full"),
    "frozen": ("model.freeze=[layers.0.mlp,norm]",),
    "everything": (
        "optimizer=adamw_bf16",
        "precision=bf16_pure",
        "train.ema=null",
        "memory.loss_chunk=5",
        "activation_checkpointing=full",
        "model.freeze=[norm]",
    ),
}
for one in catalogue.TECHNIQUES:
    if one.setting not in ELSEWHERE:
        TECHNIQUES[one.setting] = (*one.setting.split(), *BESIDE.get(one.setting, ()))
if find_spec("torchao") is not None:
    TECHNIQUES |= {kind: (f"precision={kind}",) for kind in ("int8", "fp8")}
PLACES = [("forward", 2), ("loss", 3), ("backward", 2)]
NIGHTLY = pytest.mark.nightly
# With each push each technique once, in a place in turn.
CELLS = [
    pytest.param(technique, *place, marks=() if number % 3 == turn else NIGHTLY)
    for number, technique in enumerate(TECHNIQUES)
    for turn, place in enumerate(PLACES)
]


def test_the_exceptions_are_in_the_catalogue():
    assert ELSEWHERE.keys() | BESIDE.keys() <= {one.setting for one in catalogue.TECHNIQUES}


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "phase", "operation"), CELLS)
def test_a_failure_is_the_replay_of_its_schedule(tmp_path, technique, phase, operation):
    failed = Recorded(tiny(tmp_path, *GPT, *TECHNIQUES[technique]), Fault(phase, 2, operation))
    assert [f.phase for f in failed.failures] == [phase]
    wanted = undisturbed(*GPT, *TECHNIQUES[technique], schedule=tuple(failed.run.sizes.micro_schedule().items()))
    assert runs.differences(failed.record(), wanted) == []
    # Negative control: the schedule one step late.
    late = undisturbed(*GPT, *TECHNIQUES[technique], schedule=((1, 8), (3, 4)))
    assert runs.differences(failed.record().state["model"], late.state["model"]) != []


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=() if name == "everything" else NIGHTLY) for name in TECHNIQUES]
)
def test_a_real_limit(tmp_path, technique):
    peak = peak_of(tmp_path / "peak", (*GPT, *TECHNIQUES[technique]), 5)
    chosen = (*GPT, *TECHNIQUES[technique], "batch.micro_size=16")
    failed = Recorded(tiny(tmp_path / "failed", *chosen, changes={"memory.limit": peak}))
    assert failed.failures
    assert failed.run.memory.peak <= peak
    wanted = undisturbed(*chosen, schedule=tuple(failed.run.sizes.micro_schedule().items()))
    assert runs.differences(failed.record(), wanted) == []
