"""What follows an out-of-memory error: the step is taken back, the size changes, everybody is told."""

import contextlib
import json
import logging
import os
import time
from typing import NoReturn

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped
from trainapp.memory.timeline import Picture
from trainapp.oom import incident
from trainapp.oom.advice import memory_report
from trainapp.oom.incident import Incident
from trainapp.parallel.ranks import OUT_OF_MEMORY_EXIT, Alone
from trainapp.train import build
from trainapp.train.run import Job

RESTART = "restart.json"
log = logging.getLogger(__name__)


def undo_step(job: Job, failure: Incident) -> None:
    """Back to the start of the step: gradients dropped, memory given back, generators and buffers as they were.

    What was done after a commit stays: an evaluation restores the generators itself, and moves no buffer.
    """
    state = job.state
    if not failure.alone:
        job.strategy.give_up()
    state.optimizer.zero_grad(set_to_none=True)
    state.precision.reset_scaler()
    state.model.train()
    job.memory.release()
    if failure.in_transaction:
        job.restore_point.restore()


def change_size(config: Config, job: Job, failure: Incident) -> None:
    """Choose the size of the next attempt. Raises TrainingStopped when it was the smallest already.

    The same size again, once, where giving back the allocator's cache may have been enough (cuBLAS and cuDNN allocate
    outside it), and for work that has no size; else what the search says.
    """
    sizes = job.state.eval_micro if failure.evaluating else job.state.micro
    has_size = failure.evaluating or failure.in_transaction or failure.phase == "commit"
    failure.old_size = failure.new_size = sizes.size_at_work
    attempt = (failure.step, failure.phase, failure.old_size)
    may_fit = not has_size or failure.by_peer or failure.unused_cache > (failure.requested or 0)
    ranks = Alone() if failure.alone else job.ranks
    if ranks.smallest(int(may_fit and job.retried != attempt)):  # each rank knows its own phase only
        job.retried = attempt
        failure.action = f"micro-batch {failure.old_size} again, after giving back the allocator's unused cache"
        return
    changed = sizes.failed(ranks, culprit=not failure.by_peer) if has_size else None
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
    if failure.by_peer:
        ranks = ", ".join(str(rank) for rank, _ in failure.culprits)
        log.warning("rank %s ran out of memory at step %d: %s", ranks, failure.step, failure.action)
        return
    prefix = f"rank {failure.rank}: " if job.ranks.world > 1 else ""
    log.warning("%s%s", prefix, incident.one_line(failure))
    folder, number = job.tracker.run_dir / "oom", job.memory.out_of_memory_count
    try:
        path = incident.write(failure, folder, number, job.ranks.world)
        job.memory.dump(path.with_suffix(".snapshot.pickle"))
        job.tracker.incident(incident.report(failure), failure.step)
        if failure.events:
            title = f"out of memory at step {failure.step} in {failure.phase}, micro-batch {failure.old_size}"
            file = path.with_suffix(".png")
            picture = Picture(failure.events, failure.kinds, failure.limit, title, file)
            job.tracker.picture("out_of_memory", picture, failure.step)
    except (OSError, MemoryError) as error:  # the run matters more than its record
        log.warning("the incident's record could not be written: %s", error)


def leave_for_restart(job: Job, failure: Incident) -> NoReturn:
    """End this worker; what the next ones need to know is left in the run directory."""
    search = job.state.eval_micro if failure.evaluating else job.state.micro
    changed = search.failed(Alone())
    if changed is None:
        raise TrainingStopped(f"{incident.one_line(failure)}; nothing is left to halve")
    log.warning(
        "rank %d: %s: not recoverable in place (%s): all ranks start again from the last checkpoint with micro-batch "
        "%d instead of %d",
        job.ranks.rank, incident.one_line(failure),
        "inside the commit" if failure.phase == "commit" else "no votes are held for a proven size",
        changed[1], changed[0],
    )  # fmt: skip
    incident.write(failure, job.tracker.run_dir / "oom", job.memory.out_of_memory_count, job.ranks.world)
    hint = {"eval_micro" if failure.evaluating else "micro": search.state_dict()}
    (job.tracker.run_dir / RESTART).write_text(json.dumps(hint))
    logging.shutdown()
    os._exit(OUT_OF_MEMORY_EXIT)


def take_hint(job: Job) -> None:
    """After such a restart: the sizes that were left for this one."""
    with contextlib.suppress(OSError, ValueError):
        hint = json.loads((job.tracker.run_dir / RESTART).read_text())
        for name, sizes in (("micro", job.state.micro), ("eval_micro", job.state.eval_micro)):
            if name in hint:
                sizes.start = min(sizes.start, hint[name]["start"])
                sizes.load_state_dict(hint[name])
