"""How a run ended: what result.json holds."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from trainapp import strict_json
from trainapp.data.micro_batch_sizes import Plan
from trainapp.data.progress import Progress
from trainapp.files import atomic_write
from trainapp.tracking.tracker import RESULT
from trainapp.train.bilinear import bilinear_modules_with_two_roundings
from trainapp.train.run import Run
from trainapp.train.sizes import as_schedule
from trainapp.units import listed


@dataclass
class RunResult:
    """How a run ended; written to result.json. Sizes in samples, memory in bytes."""

    objective: float | None  # of the last evaluation; it may be nan or inf, which the file cannot hold
    objective_note: str | None  # why it is not a number
    metric: str
    evaluation: dict[str, float]  # the last evaluation's metrics, those of `eval` as `eval_NAME/METRIC`
    steps: int
    samples: int
    micro_size: int
    accumulation: int
    oom_restarts: int  # since the run began, in whatever process
    micro_schedule: dict[int, Plan]  # set as batch.micro_schedule, it replays the sizes of this run
    bit_for_bit: bool  # whether nothing is known that keeps a replay from the same bits: see docs/oom.md
    bit_for_bit_note: str | None  # why not
    peak_memory_bytes: int
    peak_reserved_bytes: int  # with the allocator's unused cache, which counts towards the limit on CUDA
    samples_per_second: float
    seconds: float
    checkpoint: str | None


def result_of(run: Run, seconds: float) -> RunResult:
    """The run's result. Collective: call on every rank."""
    progress, size = run.state.progress, run.sizes.train.size
    history = run.history()
    note = why_not_bit_for_bit(run, history["not_replayed"])
    peaks = run.ranks.all_gather_object((run.memory.peak, run.memory.peak_reserved))
    return RunResult(
        objective=progress.objective,
        objective_note=_note(progress),
        metric=run.objective.metric,
        evaluation=run.last_evaluation,
        steps=progress.step,
        samples=progress.samples,
        micro_size=size,
        accumulation=run.batches.accumulation(size, run.sizes.parts),
        oom_restarts=history["oom_restarts"],
        micro_schedule=as_schedule(history["used"]),
        bit_for_bit=note is None,
        bit_for_bit_note=note,
        peak_memory_bytes=max(peak for peak, _ in peaks),
        peak_reserved_bytes=max(reserved for _, reserved in peaks),
        samples_per_second=run.meter.samples_per_second(),
        seconds=seconds,
        checkpoint=run.checkpointer.newest_name(),
    )


def _note(progress: Progress) -> str | None:
    """Why the objective is not a number, and whether it ever was; None if it is, or if nothing was evaluated."""
    if progress.objective is None or math.isfinite(progress.objective):
        return None
    return f"{progress.objective} at {'the last' if progress.best is not None else 'every'} evaluation"


def why_not_bit_for_bit(run: Run, not_replayed: list[str]) -> str | None:
    """A known reason why a replay of the run's sizes may differ from it in its last bits; None where none is known.

    not_replayed: what has happened since the run began that a schedule of sizes does not repeat, on any rank.
    """
    kind = run.state.device.type
    if not_replayed:
        return f"a schedule of sizes does not replay this: {'; '.join(not_replayed)}"
    if kind == "cpu":
        bilinear = bilinear_modules_with_two_roundings(run.state)
        return f"nn.Bilinear ({listed(bilinear)}) has another rounding while memory is counted" if bilinear else None
    if kind != "cuda" or not run.config.train.deterministic:
        note = "" if kind != "cuda" else ", train.deterministic=false"
        return f"kernels may add in any order ({kind}{note})"
    return None


def write(run_dir: Path, result: RunResult) -> None:
    """Write result.json. Raises OSError when it cannot be written; an older one then stays."""
    facts = asdict(result)
    for note in ("objective_note", "bit_for_bit_note"):
        if facts[note] is None:
            del facts[note]
    with atomic_write(run_dir / RESULT) as file:
        file.write(strict_json.dumps(facts, indent=1) + "\n")
