"""What follows an out-of-memory error: the step is taken back, the size changes, everybody is told."""

import logging
import time
from pathlib import Path

from trainapp import build, incident, timeline
from trainapp.advice import memory_report
from trainapp.config import Config
from trainapp.errors import TrainingStopped
from trainapp.incident import Incident
from trainapp.job import Job

log = logging.getLogger(__name__)


def undo_step(job: Job, evaluating: bool) -> None:
    """Back to the start of the step: gradients dropped, memory given back, generators and buffers as they were."""
    state = job.state
    state.optimizer.zero_grad(set_to_none=True)
    state.precision.reset_scaler()
    state.model.train()
    job.memory.release()
    if not evaluating:  # an evaluation restores the generators itself and moves no buffer
        job.restore_point.restore()


def change_size(config: Config, job: Job, failure: Incident) -> None:
    """Choose the size of the next attempt. Raises TrainingStopped when it was 1 already.

    The same size again, once, where giving back the allocator's cache may have been enough (cuBLAS and cuDNN allocate
    outside it); else what the search says.
    """
    sizes = job.state.eval_micro if failure.evaluating else job.state.micro
    failure.old_size = failure.new_size = sizes.search(sizes.current or 0).size
    attempt = (failure.step, failure.evaluating, failure.old_size)
    if failure.unused_cache > (failure.requested or 0) > 0 and job.retried != attempt:
        job.retried = attempt
        failure.action = f"micro-batch {failure.old_size} again, after giving back the allocator's unused cache"
        return
    changed = sizes.failed()
    if changed is None:
        raise TrainingStopped(memory_report(config, job, failure))
    failure.old_size, failure.new_size = changed
    setting = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    failure.action = f"{setting} {changed[0]} -> {changed[1]}, the same step again"
    if not failure.evaluating and not config.oom.keep_global_batch:
        smaller = max(1, job.state.global_size * changed[1] // changed[0])
        failure.action += (
            f"; oom.keep_global_batch=false: the global batch falls from {job.state.global_size} to {smaller}"
        )
        build.set_global_size(config, job, smaller)


def record(job: Job, failure: Incident, started: float) -> None:
    """Tell everybody: the terminal at once, oom/ in the run directory, TensorBoard."""
    failure.seconds_lost = time.monotonic() - started
    log.warning("%s", incident.one_line(failure))
    folder, number = job.tracker.run_dir / "oom", job.memory.out_of_memory_count
    try:
        path = incident.write(failure, folder, number)
        job.memory.dump(path.with_suffix(".snapshot.pickle"))
        picture = None
        if failure.events:
            title = f"out of memory at step {failure.step} in {failure.phase}, micro-batch {failure.old_size}"
            file: Path = path.with_suffix(".png")
            picture = timeline.draw(failure.events, failure.kinds, failure.limit, title, file)
        job.tracker.incident(incident.report(failure), picture, failure.step)
    except (OSError, MemoryError) as error:  # the run matters more than its record
        log.warning("the incident's record could not be written: %s", error)
