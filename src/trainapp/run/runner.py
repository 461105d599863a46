"""Builds a run, restarts its inner loop when memory runs out, and reports how it ended."""

import contextlib
import dataclasses
import gc
import logging
import os
import time
from pathlib import Path

from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory, resolve
from trainapp.checkpoint.manifest import read_manifest
from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped
from trainapp.memory import host_guard
from trainapp.oom import hints, incident, recovery
from trainapp.oom.errors import is_device_lost, is_out_of_memory
from trainapp.oom.incident import Incident
from trainapp.optim.optimizers import lean_optimizer
from trainapp.parallel.ranks import SingleRank
from trainapp.run import export
from trainapp.run.result import RunResult, report, result_of, write
from trainapp.signals import StopRequest
from trainapp.tracking.tracker import RESULT
from trainapp.train import build, loop
from trainapp.train.run import Run
from trainapp.units import parse_memory_size

log = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """A signal ended the run after its step was finished and saved. Ends a sweep, too."""


def run(config: Config, ranks: SingleRank | None = None) -> RunResult:
    """One run from start to end. Raises UserError, and Interrupted after a signal."""
    started = time.monotonic()
    if not gc.get_freeze_count():  # what was imported stays: to look through it cost 0.14 s for each recovery
        gc.freeze()
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        run = prepare(config, stop, ranks or SingleRank())
        if run.state.device.type == "cpu":
            stack.enter_context(host_guard.guarded(config.memory, run.memory.total))
        restarts = 0
        try:
            log.info("%s", build.plan_line(config, run))
            while True:
                failure = attempt(config, run)
                if failure is None:
                    break
                restarts += 1
                run = recover(config, run, failure, stop)
        finally:
            if run.ranks.is_rank_zero and run.state is not None:
                hints.remember(config, run)
            run.close()
        result = result_of(run, restarts, time.monotonic() - started)
    if run.ranks.is_rank_zero:
        if config.mode == "train" and (run.meter.samples or not (Path(config.run_dir) / RESULT).exists()):
            write(Path(config.run_dir), result)  # not over that of a run which was finished already
        report(config, run, result)
    if run.stopping:
        if run.ranks.is_rank_zero and config.checkpointing.save:
            print(f"Resume with:\n  {config.command}", flush=True)
        stop.pass_on(run.stopping)
        raise Interrupted(128 + run.stopping)
    return result


def prepare(config: Config, stop: StopRequest, ranks: SingleRank) -> Run:
    """Build everything, then continue from a checkpoint: the one that was asked for, else this directory's own."""
    path = ranks.all_gather_object(_checkpoint_to_resume(config) if ranks.is_rank_zero else None)[0]
    if path is not None:
        config = _with_its_seed(config, path)
    if config.mode != "train":
        config = _with_its_average(config, path)
    run = build.build(config, stop, ranks)
    if config.oom.enabled and hints.recall(config, run):
        log.info(
            "micro-batch %d, as an earlier run of this run found (oom.remember=clear forgets it)", run.state.micro.size
        )
    if path is not None:
        restore(config, run, path)
    build.start_tracking(config, run)
    if restarted():
        recovery.take_hint(run)
    return run


def _with_its_seed(config: Config, path: Path) -> Config:
    """The seed is part of the sampler's state: another one in the middle of an epoch would repeat and omit samples."""
    kept = read_manifest(path)["config"]["train"]["seed"]
    if kept != config.train.seed:
        log.warning("train.seed=%d: the run that goes on has seed %d and keeps it", config.train.seed, kept)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=kept))


def _with_its_average(config: Config, path: Path) -> Config:
    """A run that kept an average of its weights evaluated that: whoever looks at its checkpoint does the same."""
    kept = read_manifest(path)["config"]["train"]["ema"]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, ema=kept))


def _checkpoint_to_resume(config: Config) -> Path | None:
    resume = config.checkpointing.resume
    own = CheckpointDirectory(Path(config.run_dir), 1, SingleRank())
    if restarted() and own.newest_name():
        return own.newest()
    if resume not in ("auto", "none"):
        return resolve(resume)
    return own.newest() if resume == "auto" else None


def restarted() -> bool:
    """Whether the launcher has started the workers of this run before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def restore(config: Config, run: Run, path: Path) -> None:
    """Continue `run` from the checkpoint at `path`. Raises UserError when it does not fit the model."""
    sizes = checkpointer.restore(run.state, path, run.ranks)
    progress = run.state.progress
    if sizes["budget"] == run.state.budget:  # what fitted into another amount of memory says nothing about this one
        if config.batch.micro_size == "auto" and config.accumulation.steps == "auto":
            run.state.micro.load_state_dict(sizes["micro"])
        if config.batch.eval_micro_size == "auto":
            run.state.eval_micro.load_state_dict(sizes["eval_micro"])
    if not config.oom.keep_global_batch and sizes["global"] < run.state.global_size:
        build.set_global_size(config, run, sizes["global"])
    run.checkpointer.saved_at = progress.step
    if progress.consumed >= run.batches.epoch_samples:  # another batch size or drop_last leaves nothing of the epoch
        progress.epoch, progress.consumed = progress.epoch + 1, 0
    log.info("resumed from %s: step %d, epoch %d, %d samples", path, progress.step, progress.epoch, progress.samples)


def attempt(config: Config, run: Run) -> Incident | None:
    """The inner loop. Returns what is known of an out-of-memory error once nothing holds its tensors any more."""
    try:
        if config.mode == "eval":
            loop.evaluate(run)
        elif config.mode == "export":
            folder = Path(config.export.folder or Path(config.run_dir) / "export")
            export.export(run, folder, parse_memory_size(config.export.file_size, 0))
        else:
            loop.train(run)
    except Exception as error:
        if run.ranks.world == 1 and is_device_lost(error):  # with several ranks the launcher starts all again
            raise TrainingStopped(
                f"the device is lost for this process ({str(error).strip().splitlines()[0]}): only a new one can use "
                f"it; continue from the last checkpoint with\n  {config.command}"
            ) from error
        if not config.oom.enabled or run.phase == "save" or not is_out_of_memory(error):
            raise
        failure = incident.describe(run, error)  # plain values: the traceback keeps every failed tensor alive
    else:
        return None
    return failure


def together(config: Config, run: Run, failure: Incident) -> None:
    """With several ranks: tell the others, and wait until all have left the step.

    Where nobody listens (votes not armed, or inside the commit) this worker ends with a code of its own; the launcher
    starts all of them again from the last checkpoint, with the smaller micro-batch that is left for them in a file.
    """
    ranks = run.ranks
    if failure.alone:
        return
    if not failure.by_peer:
        # torch unscales shards with a reduction of its own that no vote can stop
        listened = (failure.in_transaction and failure.phase != "unscale") or failure.evaluating
        if not ranks.votes_enabled or not listened:
            recovery.leave_for_restart(run, failure)
        ranks.vote(True)
    ranks.drop_agreement()
    told = ranks.all_gather_object(None if failure.by_peer else (ranks.rank, incident.one_line(failure)))
    failure.culprits = [text for text in told if text is not None]


def recover(config: Config, run: Run, failure: Incident, stop: StopRequest) -> Run:
    """Take the step back, make the size smaller, and return the run to go on with. Runs outside `except`."""
    run.memory.out_of_memory_count += 1
    together(config, run, failure)
    if failure.host:
        host_guard.give_memory_back()
    recovery.undo_step(run, failure)
    if failure.phase == "commit":
        return _start_again(config, run, failure, stop)
    recovery.change_size(config, run, failure)
    recovery.record(run, failure, run.attempt_started)
    return run


def _start_again(config: Config, run: Run, failure: Incident, stop: StopRequest) -> Run:
    """An error inside the commit may have torn the optimizer: back to the last checkpoint, or to the start."""
    lost_from, count, peak = run.state.progress.step, run.memory.out_of_memory_count, run.memory.peak
    config, lean = lean_optimizer(config, run.state.optimizer)
    path = run.checkpointer.newest()
    where = f"the checkpoint of step {read_manifest(path)['step']}" if path else "the start, from the seed"
    if lean:
        failure.old_size = failure.new_size = run.state.micro.size
        change = "an optimizer without temporaries (foreach=false)"
    else:
        recovery.change_size(config, run, failure)
        change = f"micro-batch {failure.old_size} -> {failure.new_size}"
    sizes, started, memory = run.state.micro.state_dict(), run.attempt_started, run.memory
    done = read_manifest(path)["step"] if path else 0
    failure.action = (
        f"the parameters may be half updated, so back to {where}; {lost_from - done} finished steps are done again, "
        f"with {change}"
    )
    recovery.record(run, failure, started)
    run.close()
    run.state = run.meter = run.restore_point = None  # the old model and the new one would not fit together
    memory.release()
    resume = str(path) if path else "none"
    again = dataclasses.replace(config, checkpointing=dataclasses.replace(config.checkpointing, resume=resume))
    run = prepare(again, stop, run.ranks)
    run.state.micro.load_state_dict(sizes)
    run.size_plan.clear()  # the plan's sizes are what failed
    run.memory.out_of_memory_count, run.memory.peak = count, peak
    return run
