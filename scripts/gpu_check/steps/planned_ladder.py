"""The ladder: levers and stacks of them on a GPT that takes half of the device: peaks, planned and measured; time."""

import statistics
from pathlib import Path

import helpers
from gpu import on_gpu

from .. import planned
from ..table import Table

SHARE = 0.5  # of the device, for the run without a lever
MOST_SAMPLES = 512  # of a global batch: beyond, a step takes seconds
RUNGS = {"cuda": planned.LEVERS, "cpu": planned.LEVERS[::3]}
PATIENCE = 120.0  # seconds for all plans
GPT = ("model.context_length=1024", "data.vocab_size=32000", "data.size=2048")


def check(table: Table, device: str, folder: Path) -> None:
    """One row per rung, one for the lowest of all, and one for how good the plans are."""
    told = planned.spelled(device)
    model = GPT if device == "cuda" else ()
    samples = size(device, (*planned.overrides(device, "gpt", model), *told))
    sized = (*model, f"batch.global_size={samples}", f"batch.micro_size={samples}")
    rungs = RUNGS[device]
    settings = [planned.overrides(device, "gpt", (*sized, *lever)) for lever in rungs]
    plans = planned.plans([(*own, *told) for own in settings], PATIENCE)
    found, first = [], None
    for number, (lever, facts) in enumerate(zip(rungs, plans, strict=True)):
        name = f"{samples} samples, {' '.join(lever) or 'without a lever'}"
        with table.attempt(name, "a plan and a run"):
            run_dir = folder / str(number)
            both = planned.compared(name, facts, on_gpu.launched(run_dir, *settings[number]))
            seconds = step_seconds(run_dir, samples)
            first = first or (both.measured, seconds)
            ratios = f"peak x {both.measured / first[0]:.3f}, time x {seconds / first[1]:.2f}"
            table.measured(name, f"{both.text}; {ratios}")
            found.append(both)
        if device == "cuda":
            on_gpu.forget()
    expected = f"median at most {100 * planned.MEDIAN:.0f}%, worst at most {100 * planned.WORST:.0f}%"
    table.expect("the plan's peaks of the ladder", expected, *planned.summary([both.error for both in found]))
    if len(found) == len(rungs):
        table.measured("the whole stack", f"{found[0].measured / found[-1].measured:.1f} times less than without")


def size(device: str, settings: tuple[str, ...]) -> int:
    """Samples with which the run without a lever takes SHARE of the device; as planned."""
    if device == "cpu":
        return 16
    searching = ("batch.micro_size=auto", f"batch.global_size={MOST_SAMPLES}", f"memory.limit={SHARE}")
    (facts,) = planned.plans([(*settings, *searching)], PATIENCE)
    return max(1, facts.get("largest_micro_size") or 0)


def step_seconds(run_dir: Path, samples: int) -> float:
    """Of a usual step: the median of those after the first, which loads kernels."""
    return samples / statistics.median(line["samples_per_second"] for line in helpers.metrics(run_dir)[1:])
