"""Builds a run, restarts its inner loop when memory runs out, and reports how it ended."""

import contextlib
import dataclasses
import gc
import logging
import os
import time
from pathlib import Path

from trainapp.checkpoint import saver
from trainapp.checkpoint.checkpoints import Checkpoints, read_manifest, resolve
from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped
from trainapp.memory import host_guard
from trainapp.oom import hints, incident, recovery
from trainapp.oom.errors import is_device_lost, is_out_of_memory
from trainapp.oom.incident import Incident
from trainapp.optim.optimizers import lean_optimizer
from trainapp.parallel.ranks import Alone
from trainapp.run import export
from trainapp.run.result import RunResult, report, result_of, write
from trainapp.signals import StopRequest
from trainapp.tracking.tracker import RESULT
from trainapp.train import build, loop
from trainapp.train.run import Job
from trainapp.units import parse_memory_size

log = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """A signal ended the run after its step was finished and saved. Ends a sweep, too."""


def run(config: Config, ranks: Alone | None = None) -> RunResult:
    """One run from start to end. Raises UserError, and Interrupted after a signal."""
    started = time.monotonic()
    if not gc.get_freeze_count():  # what was imported stays: to look through it cost 0.14 s for each recovery
        gc.freeze()
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        job = prepare(config, stop, ranks or Alone())
        if job.state.device.type == "cpu":
            stack.enter_context(host_guard.guarded(config.memory, job.memory.total))
        restarts = 0
        try:
            log.info("%s", build.plan_line(config, job))
            while True:
                failure = attempt(config, job)
                if failure is None:
                    break
                restarts += 1
                job = recover(config, job, failure, stop)
        finally:
            if job.ranks.leads and job.state is not None:
                hints.remember(config, job)
            job.close()
        result = result_of(job, restarts, time.monotonic() - started)
    if job.ranks.leads:
        if config.mode == "train" and (job.meter.samples or not (Path(config.run_dir) / RESULT).exists()):
            write(Path(config.run_dir), result)  # not over that of a run which was finished already
        report(config, job, result)
    if job.stopping:
        if job.ranks.leads and job.checkpoints.enabled:
            print(f"Resume with:\n  {config.command}", flush=True)
        stop.pass_on(job.stopping)
        raise Interrupted(128 + job.stopping)
    return result


def prepare(config: Config, stop: StopRequest, ranks: Alone) -> Job:
    """Build everything, then continue from a checkpoint: the one that was asked for, else this directory's own."""
    path = ranks.gather(_checkpoint_to_resume(config) if ranks.leads else None)[0]
    if path is not None:
        config = _with_its_seed(config, path)
    if config.mode != "train":
        config = _with_its_average(config, path)
    job = build.build(config, stop, ranks)
    if config.oom.enabled and hints.recall(config, job):
        log.info(
            "micro-batch %d, as an earlier run of this job found (oom.remember=clear forgets it)", job.state.micro.size
        )
    if path is not None:
        restore(config, job, path)
    build.start_tracking(config, job)
    if restarted():
        recovery.take_hint(job)
    return job


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
    own = Checkpoints(Path(config.run_dir), 1)
    if restarted() and own.newest_name():
        return own.newest()
    if resume not in ("auto", "none"):
        return resolve(resume)
    return own.newest() if resume == "auto" else None


def restarted() -> bool:
    """Whether the launcher has started the workers of this run before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def restore(config: Config, job: Job, path: Path) -> None:
    """Continue `job` from the checkpoint at `path`. Raises UserError when it does not fit the model."""
    sizes = saver.restore(job.state, path, job.ranks)
    progress = job.state.progress
    if sizes["budget"] == job.state.budget:  # what fitted into another amount of memory says nothing about this one
        if config.batch.micro_size == "auto" and config.accumulation.steps == "auto":
            job.state.micro.load_state_dict(sizes["micro"])
        if config.batch.eval_micro_size == "auto":
            job.state.eval_micro.load_state_dict(sizes["eval_micro"])
    if not config.oom.keep_global_batch and sizes["global"] < job.state.global_size:
        build.set_global_size(config, job, sizes["global"])
    job.saved_at = progress.step
    if progress.consumed >= job.batches.epoch_samples:  # another batch size or drop_last leaves nothing of the epoch
        progress.epoch, progress.consumed = progress.epoch + 1, 0
    log.info("resumed from %s: step %d, epoch %d, %d samples", path, progress.step, progress.epoch, progress.samples)


def attempt(config: Config, job: Job) -> Incident | None:
    """The inner loop. Returns what is known of an out-of-memory error once nothing holds its tensors any more."""
    try:
        if config.mode == "eval":
            loop.evaluate(job)
        elif config.mode == "export":
            folder = Path(config.export.folder or Path(config.run_dir) / "export")
            export.export(job, folder, parse_memory_size(config.export.file_size, 0))
        else:
            loop.train(job)
    except Exception as error:
        if job.ranks.world == 1 and is_device_lost(error):  # with several ranks the launcher starts all again
            raise TrainingStopped(
                f"the device is lost for this process ({str(error).strip().splitlines()[0]}): only a new one can use "
                f"it; continue from the last checkpoint with\n  {config.command}"
            ) from error
        if not config.oom.enabled or job.phase == "save" or not is_out_of_memory(error):
            raise
        failure = incident.describe(job, error)  # plain values: the traceback keeps every failed tensor alive
    else:
        return None
    return failure


def together(config: Config, job: Job, failure: Incident) -> None:
    """With several ranks: tell the others, and wait until all have left the step.

    Where nobody listens (votes not armed, or inside the commit) this worker ends with a code of its own; the launcher
    starts all of them again from the last checkpoint, with the smaller micro-batch that is left for them in a file.
    """
    ranks = job.ranks
    if failure.alone:
        return
    if not failure.by_peer:
        # torch unscales shards with a reduction of its own that no vote can stop
        listened = (failure.in_transaction and failure.phase != "unscale") or failure.evaluating
        if not ranks.armed or not listened:
            recovery.leave_for_restart(job, failure)
        ranks.vote(True)
    ranks.drop_agreement()
    told = ranks.gather(None if failure.by_peer else (ranks.rank, incident.one_line(failure)))
    failure.culprits = [text for text in told if text is not None]


def recover(config: Config, job: Job, failure: Incident, stop: StopRequest) -> Job:
    """Take the step back, make the size smaller, and return the job to go on with. Runs outside `except`."""
    job.memory.out_of_memory_count += 1
    together(config, job, failure)
    if failure.host:
        host_guard.give_memory_back()
    recovery.undo_step(job, failure)
    if failure.phase == "commit":
        return _start_again(config, job, failure, stop)
    recovery.change_size(config, job, failure)
    recovery.record(job, failure, job.attempt_started)
    return job


def _start_again(config: Config, job: Job, failure: Incident, stop: StopRequest) -> Job:
    """An error inside the commit may have torn the optimizer: back to the last checkpoint, or to the start."""
    lost_from, count, peak = job.state.progress.step, job.memory.out_of_memory_count, job.memory.peak
    config, lean = lean_optimizer(config, job.state.optimizer)
    path = job.checkpoints.newest() if job.checkpoints.enabled else None
    where = f"the checkpoint of step {read_manifest(path)['step']}" if path else "the start, from the seed"
    if lean:
        failure.old_size = failure.new_size = job.state.micro.size
        change = "an optimizer without temporaries (foreach=false)"
    else:
        recovery.change_size(config, job, failure)
        change = f"micro-batch {failure.old_size} -> {failure.new_size}"
    sizes, started, memory = job.state.micro.state_dict(), job.attempt_started, job.memory
    done = read_manifest(path)["step"] if path else 0
    failure.action = (
        f"the parameters may be half updated, so back to {where}; {lost_from - done} finished steps are done again, "
        f"with {change}"
    )
    recovery.record(job, failure, started)
    job.close()
    job.state = job.meter = job.restore_point = None  # the old model and the new one would not fit together
    memory.release()
    resume = str(path) if path else "none"
    again = dataclasses.replace(config, checkpointing=dataclasses.replace(config.checkpointing, resume=resume))
    job = prepare(again, stop, job.ranks)
    job.state.micro.load_state_dict(sizes)
    job.size_plan.clear()  # the plan's sizes are what failed
    job.memory.out_of_memory_count, job.memory.peak = count, peak
    return job
