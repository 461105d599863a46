"""How a run ended: what result.json holds."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trainapp.data.micro_batch_sizes import Plan
from trainapp.tracking.tracker import RESULT
from trainapp.train.run import Run
from trainapp.train.sizes import as_schedule


@dataclass
class RunResult:
    """How a run ended; written to result.json. Sizes in samples, memory in bytes."""

    objective: float | None
    metric: str
    steps: int
    samples: int
    micro_size: int
    accumulation: int
    oom_restarts: int  # since the run began, in whatever process
    micro_schedule: dict[int, Plan]  # set as batch.micro_schedule, it replays the sizes of this run
    peak_memory_bytes: int
    samples_per_second: float
    seconds: float
    checkpoint: str | None


def result_of(run: Run, seconds: float) -> RunResult:
    """The run's result. Collective: call on every rank."""
    progress, size = run.state.progress, run.sizes.train.size
    history = run.sizes.history(run.ranks)
    return RunResult(
        objective=progress.objective,
        metric=run.objective.metric,
        steps=progress.step,
        samples=progress.samples,
        micro_size=size,
        accumulation=run.batches.accumulation(size, run.sizes.parts),
        oom_restarts=history["oom_restarts"],
        micro_schedule=as_schedule(history["used"]),
        peak_memory_bytes=max(run.ranks.all_gather_object(run.memory.peak)),
        samples_per_second=run.meter.samples_per_second(),
        seconds=seconds,
        checkpoint=run.checkpointer.newest_name(),
    )


def write(run_dir: Path, result: RunResult) -> None:
    """Write result.json."""
    (run_dir / RESULT).write_text(json.dumps(asdict(result), indent=1) + "\n")
