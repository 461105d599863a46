"""What follows an out-of-memory error: the step is taken back, the size changes, everybody is told."""

import contextlib
import json
import logging
import os
import time
from typing import NoReturn

from trainapp.config.schema import Config
from trainapp.data.size_search import Failure
from trainapp.errors import TrainingStopped
from trainapp.memory.timeline import Picture
from trainapp.oom import incident
from trainapp.oom.advice import memory_report
from trainapp.oom.incident import Incident
from trainapp.parallel.ranks import OUT_OF_MEMORY_EXIT, SingleRank
from trainapp.train import build
from trainapp.train.run import Run

RESTART = "restart.json"
log = logging.getLogger(__name__)


def undo_step(run: Run, failure: Incident) -> None:
    """Back to the start of the step: gradients dropped, memory given back, generators and buffers as they were.

    What was done after a commit stays: an evaluation restores the generators itself, and moves no buffer.
    """
    state = run.state
    if not failure.alone:
        run.strategy.abort_step()
    state.optimizer.zero_grad(set_to_none=True)
    state.precision.reset_scaler()
    state.model.train()
    run.memory.release()
    if failure.in_transaction:
        run.restore_point.restore()


def change_size(config: Config, run: Run, failure: Incident) -> None:
    """Choose the size of the next attempt. Raises TrainingStopped when it was the smallest already.

    The same size again, once, where giving back the allocator's cache may have been enough (cuBLAS and cuDNN allocate
    outside it), and for work that has no size; else what the search says.
    """
    sizes = run.state.eval_micro if failure.evaluating else run.state.micro
    has_size = failure.evaluating or failure.in_transaction or failure.phase == "commit"
    failure.old_size = failure.new_size = sizes.size_at_work
    attempt = (failure.step, failure.phase, failure.old_size)
    may_fit = not has_size or failure.by_peer or failure.unused_cache > (failure.requested or 0)
    ranks = SingleRank() if failure.alone else run.ranks
    if ranks.all_reduce_min(int(may_fit and run.retried != attempt)):  # each rank knows its own phase only
        run.retried = attempt
        failure.action = f"micro-batch {failure.old_size} again, after giving back the allocator's unused cache"
        return
    fixed = sum(size for kind, size in run.meter.static.items() if kind != "gradients")  # those are dropped by now
    why = Failure(failure.requested, fixed, failure.limit)
    changed = sizes.failed(ranks, culprit=not failure.by_peer, failure=why) if has_size else None
    if changed is None:
        raise TrainingStopped(memory_report(config, run, failure))
    failure.old_size, failure.new_size = changed
    setting = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    failure.action = f"{setting} {changed[0]} -> {changed[1]}, the same step again"
    if not failure.evaluating and not config.oom.keep_global_batch:
        smaller = max(1, run.state.global_size * changed[1] // changed[0])
        failure.action += (
            f"; oom.keep_global_batch=false: the global batch falls from {run.state.global_size} to {smaller}"
        )
        build.set_global_size(config, run, smaller)


def record(run: Run, failure: Incident, started: float) -> None:
    """Tell everybody: the terminal at once, oom/ in the run directory, TensorBoard."""
    failure.seconds_lost = time.monotonic() - started
    if failure.by_peer:
        ranks = ", ".join(str(rank) for rank, _ in failure.culprits)
        log.warning("rank %s ran out of memory at step %d: %s", ranks, failure.step, failure.action)
        return
    prefix = f"rank {failure.rank}: " if run.ranks.world > 1 else ""
    log.warning("%s%s", prefix, incident.one_line(failure))
    folder, number = run.tracker.run_dir / "oom", run.memory.out_of_memory_count
    try:
        path = incident.write(failure, folder, number, run.ranks.world)
        run.memory.dump(path.with_suffix(".snapshot.pickle"))
        run.tracker.incident(incident.report(failure), failure.step)
        if failure.events:
            title = f"out of memory at step {failure.step} in {failure.phase}, micro-batch {failure.old_size}"
            file = path.with_suffix(".png")
            picture = Picture(failure.events, failure.kinds, failure.limit, title, file)
            run.tracker.picture("out_of_memory", picture, failure.step)
    except (OSError, MemoryError) as error:  # the run matters more than its record
        log.warning("the incident's record could not be written: %s", error)


def leave_for_restart(run: Run, failure: Incident) -> NoReturn:
    """End this worker; what the next ones need to know is left in the run directory."""
    search = run.state.eval_micro if failure.evaluating else run.state.micro
    changed = search.failed(SingleRank())
    if changed is None:
        raise TrainingStopped(f"{incident.one_line(failure)}; nothing is left to halve")
    log.warning(
        "rank %d: %s: not recoverable in place (%s): all ranks start again from the last checkpoint with micro-batch "
        "%d instead of %d",
        run.ranks.rank, incident.one_line(failure),
        "inside the commit" if failure.phase == "commit" else "no votes are held for a proven size",
        changed[1], changed[0],
    )  # fmt: skip
    incident.write(failure, run.tracker.run_dir / "oom", run.memory.out_of_memory_count, run.ranks.world)
    hint = {"eval_micro" if failure.evaluating else "micro": search.state_dict()}
    (run.tracker.run_dir / RESTART).write_text(json.dumps(hint))
    logging.shutdown()
    os._exit(OUT_OF_MEMORY_EXIT)


def take_hint(run: Run) -> None:
    """After such a restart: the sizes that were left for this one."""
    with contextlib.suppress(OSError, ValueError):
        hint = json.loads((run.tracker.run_dir / RESTART).read_text())
        for name, sizes in (("micro", run.state.micro), ("eval_micro", run.state.eval_micro)):
            if name in hint:
                sizes.start = min(sizes.start, hint[name]["start"])
                sizes.load_state_dict(hint[name])
