"""How a run ended: what result.json holds and what the terminal shows last."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.data.micro_batch_sizes import Plan
from trainapp.tracking.tracker import RESULT
from trainapp.train.run import Run
from trainapp.units import bytes_text


@dataclass
class RunResult:
    """How a run ended; written to result.json. Sizes in samples, memory in bytes."""

    objective: float | None
    metric: str
    steps: int
    samples: int
    micro_size: int
    accumulation: int
    oom_restarts: int
    micro_schedule: dict[int, Plan]  # set as batch.micro_schedule, it replays the sizes of this run
    peak_memory_bytes: int
    samples_per_second: float
    seconds: float
    checkpoint: str | None


def result_of(run: Run, restarts: int, seconds: float) -> RunResult:
    """For all ranks."""
    progress, size = run.state.progress, run.state.micro.size
    return RunResult(
        objective=progress.objective,
        metric=run.objective[1],
        steps=progress.step,
        samples=progress.samples,
        micro_size=size,
        accumulation=run.batches.accumulation(size, run.accumulation),
        oom_restarts=restarts,
        micro_schedule=run.sizes_used,
        peak_memory_bytes=max(run.ranks.all_gather_object(run.memory.peak)),
        samples_per_second=run.meter.samples_per_second(),
        seconds=seconds,
        checkpoint=run.checkpointer.newest_name(),
    )


def write(run_dir: Path, result: RunResult) -> None:
    """To result.json."""
    (run_dir / RESULT).write_text(json.dumps(asdict(result), indent=1) + "\n")


def report(config: Config, run: Run, result: RunResult) -> None:
    """The summary that ends a run."""
    best = run.state.progress.best
    rows: list[tuple[str, Any]] = []
    if result.objective is not None:
        better = f" (best {best:.4f} at step {run.state.progress.best_step})" if best is not None else ""
        rows.append((f"eval {result.metric}", f"{result.objective:.4f}{better}"))
    if config.mode == "train":
        rows += [
            ("steps", f"{result.steps} ({result.samples} samples)"),
            ("time", f"{result.seconds:.1f} s"),
            ("throughput", f"{result.samples_per_second:.0f} samples/s"),
            ("peak memory", f"{bytes_text(result.peak_memory_bytes)} of {bytes_text(run.memory.budget)}"),
            ("micro-batch", f"{result.micro_size} x {result.accumulation} accumulated"),
            ("OOM restarts", result.oom_restarts),
            ("checkpoint", result.checkpoint or "none"),
        ]
    rows.append(("outputs", config.run_dir))
    with contextlib.suppress(ValueError):
        run_dir = Path(config.run_dir)
        shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
        rows.append(("TensorBoard", f"tensorboard --logdir {shown}"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows), flush=True)
