"""After an out-of-memory error: all ranks leave the step, it is rolled back, the size changes, it is recorded."""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, NoReturn

from trainapp import strict_json
from trainapp.data.size_search import Failure
from trainapp.errors import TrainingStopped
from trainapp.files import atomic_write
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.timeline import Picture
from trainapp.oom import incident, planned
from trainapp.oom.advice import memory_report
from trainapp.oom.incident import Incident
from trainapp.parallel.ranks import OUT_OF_MEMORY_EXIT, Ranks, SingleRank
from trainapp.train.phase import Phase
from trainapp.train.run import Run
from trainapp.train.transaction import rollback
from trainapp.units import listed

RESTART = "restart.json"
log = logging.getLogger(__name__)


def abort_on_all_ranks(run: Run, failure: Incident) -> None:
    """With several ranks: tell the others, and wait until all have left the step.

    Where the others cannot be told (no votes are held, or inside the commit) this worker ends with an exit code of its
    own; the launcher then restarts all of them from the last checkpoint, with the smaller size that is left for them in
    a file.
    """
    ranks = run.ranks
    if failure.alone:
        return
    if not failure.by_peer:
        # torch unscales shards with a reduction of its own that no vote can stop
        others_can_be_told = failure.evaluating or (failure.phase.can_be_undone and failure.phase is not Phase.UNSCALE)
        if not ranks.votes_enabled or not others_can_be_told:
            leave_for_restart(run, failure)
        ranks.vote(True)
    ranks.cancel_flag_exchange()
    own = None if failure.by_peer else (ranks.rank, incident.one_line(failure))
    failure.culprits = [culprit for culprit in ranks.all_gather_object(own) if culprit is not None]


def roll_back(run: Run, failure: Incident) -> None:
    """Leave no trace of the failed attempt; see `transaction.rollback`."""
    rollback(run, failure.phase, other_ranks_wait=not failure.alone)


def find_lost_writes(run: Run, failure: Incident) -> None:
    """Set `failure.lost`, equal on all ranks: what the rollback could not restore, see `RestorePoint`."""
    ranks = SingleRank() if failure.alone else run.ranks
    by_rank = ranks.all_gather_object(run.restore_point.lost)
    failure.lost = sorted({name for names in by_rank for name in names})
    run.restore_point.tensors.written |= {
        name: run.restore_point.tensors.written.get(name, False) for name in failure.lost
    }
    if failure.lost and failure.alone and run.ranks.world > 1:  # in an evaluation of its own
        leave_for_restart(run, failure)


def change_size(run: Run, failure: Incident) -> None:
    """Choose the size of the next attempt. Raises TrainingStopped when no smaller one can fit.

    Retries the same size once where releasing the allocator's cache may be enough (cuBLAS and cuDNN allocate
    outside it), and for work that has no size; otherwise follows the search.
    """
    sizes = run.sizes.evaluation if failure.evaluating else run.sizes.train
    has_size = failure.phase.depends_on_size
    failure.old_size = failure.new_size = sizes.size_at_work
    attempt = (failure.step, failure.phase, failure.old_size)
    may_fit = not has_size or failure.by_peer or failure.unused_cache > (failure.requested or 0)
    ranks = SingleRank() if failure.alone else run.ranks
    if ranks.all_reduce_min(int(may_fit and run.attempt.retried != attempt)):  # ranks may be in different phases
        run.attempt.retried = attempt
        failure.action = f"micro-batch {failure.old_size} again, after giving back the allocator's unused cache"
        return
    changed = sizes.failed(ranks, not failure.by_peer, _outcome(run, failure)) if has_size else None
    if changed is None:
        raise TrainingStopped(memory_report(run, failure))
    failure.old_size, failure.new_size = changed
    setting = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    expected, source = planned.after_first_error(run, failure), ""
    if expected is not None and sizes.expect(expected):
        failure.new_size, source = expected, " as planned"
    failure.action = f"{setting} {failure.old_size} -> {failure.new_size}{source}, retrying the step"
    if not failure.evaluating and not run.config.oom.keep_global_batch:
        smaller = max(1, run.state.global_size * failure.new_size // failure.old_size)
        failure.action += (
            f"; oom.keep_global_batch=false: the global batch falls from {run.state.global_size} to {smaller}"
        )
        run.set_global_size(smaller)


def _outcome(run: Run, failure: Incident) -> Failure:
    """What the search may learn from the failure. Gradients may not have existed yet, so they do not count as fixed."""
    fixed = sum(size for kind, size in run.meter.static.items() if kind is not MemoryKind.GRADIENTS)
    place = (failure.phase.value, failure.module)
    return Failure(place=place, requested=failure.requested, fixed_bytes=fixed, limit=failure.limit)


def record(run: Run, failure: Incident) -> None:
    """Report the error: on the terminal at once, in oom/ of the run directory, in TensorBoard."""
    failure.seconds_lost = time.monotonic() - run.attempt.started
    if failure.by_peer:
        ranks = ", ".join(str(rank) for rank, _ in failure.culprits)
        log.warning("rank %s ran out of memory at step %d: %s", ranks, failure.step, failure.action)
        return
    prefix = f"rank {failure.rank}: " if run.ranks.world > 1 else ""
    log.warning("%s%s", prefix, incident.one_line(failure))
    folder, number = run.tracker.run_dir / "oom", run.sizes.oom_restarts
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
        run.tracker.complain(folder, error)


def leave_for_restart(run: Run, failure: Incident) -> NoReturn:
    """End this worker, leaving the sizes for the restarted workers in the run directory."""
    sizes = run.sizes.evaluation if failure.evaluating else run.sizes.train
    changed = sizes.failed(SingleRank(), True, _outcome(run, failure))
    if changed is None:
        raise TrainingStopped(f"{incident.one_line(failure)}; no smaller micro-batch can fit")
    if failure.phase.is_torn:
        reason = "inside the commit"
    elif failure.lost:
        reason = f"the forward has written {listed(failure.lost, most=5)}"
    else:
        reason = "no votes are held for a proven size"
    log.warning(
        "rank %d: %s: not recoverable in place (%s): all ranks restart from the last checkpoint with micro-batch %d "
        "instead of %d",
        run.ranks.rank,
        incident.one_line(failure),
        reason,
        changed[1],
        changed[0],
    )
    run_dir = run.tracker.run_dir
    hint = {
        "eval_micro" if failure.evaluating else "micro": sizes.state_dict(),
        "oom_restarts": run.sizes.oom_restarts,
    }
    try:
        with atomic_write(run_dir / RESTART) as file:
            file.write(strict_json.dumps(hint))
        incident.write(failure, run_dir / "oom", run.sizes.oom_restarts, run.ranks.world)
    except OSError as error:  # the restart matters more than its record
        log.warning("the incident's record could not be written: %s", error)
    logging.shutdown()
    os._exit(OUT_OF_MEMORY_EXIT)


def take_hint(run_dir: Path, has_restarted: bool, ranks: Ranks) -> dict[str, Any] | None:
    """The sizes that `leave_for_restart` left, once: the file is removed. None if there are none, or unreadable ones.

    Collective: rank 0 reads for all. has_restarted: False only removes what an earlier start has left.
    """
    hint = None
    if ranks.is_rank_zero:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            hint = json.loads((run_dir / RESTART).read_text())
        with contextlib.suppress(OSError):
            (run_dir / RESTART).unlink(missing_ok=True)
    hint = ranks.all_gather_object(hint)[0]
    return hint if has_restarted and isinstance(hint, dict) else None
