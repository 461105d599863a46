"""What a step logs: its metrics, and a picture of its memory."""

import time

from torch import Tensor

from trainapp.memory.timeline import Picture
from trainapp.optim.schedules import rates
from trainapp.tracking.meter import spread_over_ranks
from trainapp.training.phase import Phase
from trainapp.training.run import Run, Step
from trainapp.training.totals import Totals


def log(run: Run, step: Step, totals: Totals, norm: Tensor, applied: bool) -> None:
    """Note the update's metrics, and write those of the step after its last one. Waits for the device."""
    run.attempt.phase = Phase.LOG
    progress, batches = run.state.progress, run.batches
    if applied:
        run.engine.nonfinite.check()
        own = totals.means(run.ranks) | rates(step.update.optimizer) | {"grad_norm": float(norm)}
        run.logged |= {step.update.named(name): value for name, value in own.items()} | {"loss": own["loss"]}
    if progress.update or not run.logged:
        return
    scalars = run.logged | {"epoch": batches.epochs(progress)}
    scalars |= run.sizes.scalars(batches) | run.meter.scalars()
    scalars |= run.utilisation.scalars(scalars["samples_per_second"], run.ranks.world)
    scalars |= spread_over_ranks(scalars, run.ranks)
    run.tracker.log(progress.step, progress.samples, scalars, run.objective.metric)


def draw_timeline(run: Run) -> None:
    """Queue a plot of this step's memory, by kind."""
    run.attempt.phase = Phase.LOG
    step, started = run.state.progress.step, time.monotonic()
    events, kinds = run.memory.events(run.engine.gradients())
    run.memory.forget_record()
    if events:
        path = run.tracker.run_dir / "memory_timeline.png"
        title = f"memory of step {step}, micro-batch {run.sizes.train.size}"
        run.tracker.picture("memory_timeline", Picture(events, kinds, run.memory.budget, title, path), step)
    run.memory.keep_events = False
    run.meter.pause(time.monotonic() - started)
