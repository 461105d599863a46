"""The sweep: starts jobs as slots become free, answers their questions at rungs, and writes the journal.

Whatever kills it, the same command goes on: finished trials stay, running ones are waited for, interrupted ones resume
from their checkpoints, and the rest is proposed as if nothing had happened.
"""

import contextlib
import datetime
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from trainapp.config import command_line, resume_rules
from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import strict_json
from trainapp.hooks import rungs
from trainapp.launch import environment, launch
from trainapp.signals import ECHO, TIME_IS_UP, TO_BE_CONTINUED, handled_by, named, slurm_end
from trainapp.sweep import jobs, leaderboard, samplers
from trainapp.sweep.composing import Composed, Composer, settings_of, shown
from trainapp.sweep.halving import Pruner
from trainapp.sweep.jobs import Job, Slot
from trainapp.sweep.journal import Journal, Trial
from trainapp.sweep.space import Space, parse
from trainapp.units import parse_time

_POLL = 0.1  # seconds between looks at the running jobs
_RETRIES = 3  # starts of a job that was killed, as by a machine without memory, before it is left to be continued
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_MAY_CHANGE = ("trials", "parallel", "max_time", "max_failures", "retry_failed", "storage")


def run(context: HydraContext, function: TaskFunction, composed: DictConfig, arguments: list[str]) -> None:
    """Do or continue the sweep of these overrides. Raises UserError for mistakes, and SystemExit with the status: 1 if
    jobs failed, 75 if it was interrupted and the same command goes on.
    """
    environment.require_one_process("multirun", "start `python -m trainapp -m ...` once: it starts its jobs itself")
    settings, space = settings_of(composed), parse(arguments, context.config_loader)
    composer = Composer(context.config_loader, composed, space)
    propose = samplers.build(settings, space)
    with launch.locked(str(composer.folder)):
        journal = Journal(composer.folder)
        asked = _asked(settings, space)
        if journal.first:
            _require_same(journal.first, asked, composer.folder)
        with _interruptible():
            if not journal.first or journal.asked["asked"] != asked:
                print(f"checking {_count(settings, space)} jobs", flush=True)
                composer.check()
            first = tuple(journal.first.get("values", next(iter(space.samples()))))
            config = composer.job(0, first).config
        plain = json.loads(strict_json(config.to_dict(), default=str))
        if journal.first:
            _require_same_files(journal.first["config"], plain, composer.folder)
        if settings.pruner != "none":
            _require_pausable(settings, config)
        if not journal.first or journal.asked["asked"] != asked:
            started = datetime.datetime.now().isoformat(timespec="seconds")
            command = [*command_line.flags(composed.hydra), "-m", *_given(composed)]
            journal.add(
                "sweep" if not journal.first else "asked",
                asked=asked,
                command=command,
                cwd=os.getcwd(),
                started=started,
                values=first,
                config=plain,
            )
        os.environ[environment.SWEEP_STARTED] = journal.first["started"]
        launcher = None
        if composed.hydra.launcher._target_ != _BASIC:
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=function, config=composed
            )
        status = _Sweeper(settings, composer, propose, journal, config, launcher).run()
    if status:
        raise SystemExit(status)


def _given(composed: DictConfig) -> list[str]:
    """The overrides of the command line, without the sweep's directory."""
    both: Any = OmegaConf.to_container(composed.hydra.overrides, resolve=False)
    skipped = ("hydra.sweep.dir=", "hydra.mode=")
    return [text for text in (*both["task"], *both["hydra"]) if not text.startswith(skipped)]


def _asked(settings: Sweep, space: Space) -> dict[str, Any]:
    """What decides which jobs a sweep has, as plain values."""
    kept = {name: value for name, value in asdict(settings).items() if name not in _MAY_CHANGE}
    return {"fixed": sorted(space.fixed), "dimensions": space.to_dict(), **kept}


def _require_same(first: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raises UserError, with all differences, for another sweep than the directory's. A grid may have grown."""
    before, found = first["asked"], []
    for text in sorted({*before["fixed"]} ^ {*now["fixed"]}):
        found.append(f"{text}: {'no longer given' if text in before['fixed'] else 'not given before'}")
    for key in before["dimensions"].keys() | now["dimensions"].keys():
        old, new = before["dimensions"].get(key), now["dimensions"].get(key)
        has_grown = isinstance(old, list) and isinstance(new, list) and {*old} <= {*new}
        if old != new and not (has_grown and now["sampler"] == "grid"):
            found.append(f"{key}: {_shown(old)} before, {_shown(new)} now")
    if not found and list(before["dimensions"]) != list(now["dimensions"]):
        found.append(f"the order of {', '.join(before['dimensions'])}")
    names = [name for name in now if name not in ("fixed", "dimensions") and before.get(name) != now[name]]
    found += [f"sweep.{name}: {before.get(name)} before, {now[name]} now" for name in names]
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise UserError(
            f"hydra.sweep.dir={folder}: this directory belongs to another sweep:\n{lines}\nchoose another directory; a "
            f"grid may get more values, and {', '.join(f'sweep.{name}' for name in _MAY_CHANGE)} may change"
        )


def _require_same_files(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raises UserError if the same overrides compose another experiment: files have been edited, or are others."""
    found = [own for own in resume_rules.changes(before, now) if own.is_another_experiment]
    if found:
        lines = "\n".join(f"  {change}" for change in found)
        raise UserError(
            f"hydra.sweep.dir={folder}: its configuration files have changed since it began:\n{lines}\nchange them "
            "back, or choose another directory"
        )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Before there are jobs, Ctrl-C ends the sweep without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _count(settings: Sweep, space: Space) -> int:
    """How many jobs the sweep has; of an endless space, `sweep.trials`."""
    return min(space.size or math.inf, settings.trials or math.inf)  # type: ignore[return-value]


def _shown(values: Any) -> str:
    if values is None:
        return "not swept"
    return ", ".join(values) if isinstance(values, list) else f"[{values['low']:g}, {values['high']:g}]"


def _require_pausable(settings: Sweep, config: Config) -> None:
    if config.mode != "train" or not config.checkpointing.save or config.every.eval is None:
        raise UserError(
            f"sweep.pruner={settings.pruner}: pauses runs at an evaluation and continues them from a checkpoint; it "
            "needs mode=train, every.eval and checkpointing.save=true"
        )


@dataclass
class _Running:
    trial: Trial
    job: Job
    slot: Slot
    started: float


class _Sweeper:
    """The loop. launcher: one of Hydra's that runs the jobs; None: processes of this machine."""

    def __init__(
        self,
        settings: Sweep,
        composer: Composer,
        propose: samplers.Propose,
        journal: Journal,
        config: Config,
        launcher: Any,
    ):
        self.settings, self.composer, self.propose, self.journal = settings, composer, propose, journal
        self.config, self.launcher, self.folder = config, launcher, composer.folder
        self.pruner = Pruner(settings) if settings.pruner != "none" else None
        self.running: dict[int, _Running] = {}
        count = 1 if settings.parallel == "auto" else int(settings.parallel)
        self.slots = [Slot()] * count if launcher else jobs.slots(settings.parallel, config)
        retried = ("new", "stopped", "failed") if settings.retry_failed else ("new", "stopped")
        self.to_resume = [own for own in journal.trials if own.state in retried or own.was_promoted]
        self.stop, self._stopped_at, self._is_exhausted = 0, 0.0, False
        self._deadline = _deadline(settings)
        self._shown_at, self._has_said = 0.0, False
        self._killed: Counter[int] = Counter()  # by trial
        self.bar = tqdm(bar_format="{desc}", disable=not sys.stderr.isatty())

    @property
    def direction(self) -> str:
        """max or min; empty while no trial has said. Raises UserError if trials differ where they are compared."""
        found = {(own.facts["direction"], own.facts["metric"]) for own in self.journal.trials if "metric" in own.facts}
        if len(found) > 1 and (self.pruner or self.settings.sampler != "grid"):
            goals = ", ".join(" ".join(goal) for goal in sorted(found))
            raise UserError(f"objective: jobs have different ones ({goals}), which cannot be compared; set objective")
        return next(iter(found))[0] if len(found) == 1 else ""

    def run(self) -> int:
        """Until nothing is left or a signal ends it. Returns the exit status."""
        self._print_opening()
        with handled_by(self._handle), contextlib.closing(self.bar):
            try:
                self._work()
            except Exception:
                self._end_jobs()
                raise
        trials, size = self.journal.trials, _count(self.settings, self.composer.space)
        if trials:
            leaderboard.show(self.folder)
        failed = sum(own.state == "failed" for own in trials)
        if self._has_failed_often():
            print(f"sweep.max_failures={self.settings.max_failures}: no more jobs were started")
        if failed:
            print(f"{failed} failed; sweep.retry_failed=true runs them again when the sweep is continued")
        if (not_begun := size - len(trials)) and not self._is_exhausted:
            print(f"{not_begun} jobs have not begun")
        if self.stop or any(own.state in ("new", "stopped", "running") for own in trials):
            print(f"Continue with:\n  python -m trainapp continue {shown(self.folder)}", flush=True)
            return TO_BE_CONTINUED
        return int(failed > 0)

    def _work(self) -> None:
        self._find_running()
        while True:
            self._collect()
            if not self.stop:
                self._fill()
            elif not self._has_said:
                self._has_said = True
                waits = "the launcher's jobs go on by themselves" if self.launcher else "the running jobs save and end"
                name = "sweep.max_time" if self.stop == TIME_IS_UP else named(self.stop)
                self._say(f"{name}: {waits}; again to leave at once")
            if not self.running:
                return
            self._show_progress()
            time.sleep(_POLL)

    def _end_jobs(self) -> None:
        """After an error of the sweep itself: its jobs save and end."""
        for own in self.running.values():
            own.job.stop()
        while any(own.job.poll() is None for own in self.running.values()):
            time.sleep(_POLL)
        print(f"Continue with:\n  python -m trainapp continue {shown(self.folder)}", flush=True)

    def _print_opening(self) -> None:
        space = self.composer.space
        swept = [f"{key}: {_shown(values)}" for key, values in space.to_dict().items()]
        count = _count(self.settings, space)
        at_a_time = f"{len(self.slots)} at a time" if len(self.slots) > 1 else "one at a time"
        share = "".join(f", each with {text}" for text in self.slots[0].memory(self.config))
        states = Counter(own.state for own in self.journal.trials)
        known = "".join(f"; {number} {state}" for state, number in states.items())
        print(f"sweep of {count} job{'s' * (count != 1)}, {at_a_time}{share}, in {shown(self.folder)}{known}")
        print("\n".join(f"  {line}" for line in swept), flush=True)

    # What comes next

    def _fill(self) -> None:
        """Start jobs in the free slots."""
        while len(self.running) < len(self.slots) and not (self.stop or self._has_failed_often()):
            if (trial := self._next()) is None:
                return
            self._start(trial)

    def _has_failed_often(self) -> bool:
        most = self.settings.max_failures
        return most is not None and sum(own.state == "failed" for own in self.journal.trials) >= most

    def _next(self) -> Trial | None:
        if self.to_resume:
            return self.to_resume.pop(0)
        if (trial := self._promoted()) is not None:
            return trial
        trials, most = self.journal.trials, self.settings.trials
        if not self._is_exhausted and (most is None or len(trials) < most):
            number = len(trials)
            found = self.propose(number, trials, self.direction)
            if found is not None:
                self.journal.add("trial", number=number, values=found.values, attributes=dict(found.attributes))
                return trials[number]
        self._is_exhausted = True
        return None if self.running else self._promoted(is_last=True)

    def _promoted(self, is_last: bool = False) -> Trial | None:
        found = self.pruner.promotable(self.journal.trials, self.direction, is_last) if self.pruner else None
        if found is None:
            return None
        trial, rung = found
        self.journal.add("promote", number=trial.number, rung=rung)
        return trial

    def _start(self, trial: Trial) -> None:
        number = trial.number
        taken = [own.slot for own in self.running.values()]
        slot = next(own for own in self.slots if self.slots.count(own) > taken.count(own))
        try:
            job = self.composer.job(number, trial.values)
        except UserError as error:
            self._note_end(trial, jobs.Outcome("failed", {}, "; ".join(str(error).splitlines())), 0.0)
            return
        threads = trial.threads if trial.threads is not None else _threads(slot)
        self.journal.add("start", number=number, threads=threads, folder=str(job.folder))
        self._prepare_rungs(trial, job.folder)
        does = "goes on" if (job.folder / "checkpoints").exists() else "starts"
        swept = " ".join(self.composer.space.swept(trial.values)).replace("+", "")
        self._say(f"job {number} {does}{f' on {slot}' * bool(str(slot))}{f': {swept}' * bool(swept)}")
        self.running[number] = _Running(trial, self._process(trial, job, slot, threads), slot, time.monotonic())
        if self.stop:  # a signal during the start
            self.running[number].job.stop()

    def _process(self, trial: Trial, job: Composed, slot: Slot, threads: int | None) -> Job:
        if self.launcher is not None:
            launcher = self.launcher
            return jobs.Launched(lambda: launcher.launch([job.overrides], initial_job_idx=trial.number))
        more = slot.memory(job.config)
        if self.pruner and not job.config.chooses("checkpointing.keep_last"):
            more.append("checkpointing.keep_last=1")  # of paused runs there may be many
        if job.config.chooses("checkpointing.resume") and (job.folder / "checkpoints").exists():
            more.append("checkpointing.resume=auto")  # it has begun from the other run's
        return jobs.start(self.composer.command(job, trial.number, more), more, job.folder, slot, threads)

    def _prepare_rungs(self, trial: Trial, folder: Path) -> None:
        for name in (rungs.ASKS, rungs.ANSWERS, rungs.RUNGS):
            (folder / name).unlink(missing_ok=True)
        if self.pruner and (left := self.pruner.rungs(trial)):
            folder.mkdir(parents=True, exist_ok=True)
            rungs.write(folder / rungs.RUNGS, {"rungs": left, "launched": self.launcher is not None})

    # What has happened

    def _find_running(self) -> None:
        """The jobs that outlived an earlier process of this sweep; those that did not are to be resumed."""
        lost = {Path(own.folder): own for own in self.journal.trials if own.state == "running"}
        alive = jobs.found(lost)
        for folder, trial in lost.items():
            job = alive[folder]
            slot = self.slots[min(len(self.running), len(self.slots) - 1)]
            self.running[trial.number] = _Running(trial, job, slot, time.monotonic())
            if job.poll() is None:
                self._say(f"job {trial.number} still runs")

    def _collect(self) -> None:
        for number, own in list(self.running.items()):
            status = own.job.poll()
            self._answer(own.trial)
            if status is None:
                continue
            del self.running[number]
            error = getattr(own.job, "error", "")
            found = jobs.outcome(Path(own.trial.folder), self.config.mode, status, error)
            if self.stop and found.state == "stopped":  # as asked, also where it had not begun to hear signals
                found = replace(found, error="")
            if found.state == "stopped" and own.trial.reached and max(own.trial.reached) not in own.trial.promoted:
                found = jobs.Outcome("paused", found.facts)
            self._note_end(own.trial, found, time.monotonic() - own.started)
            is_lost = status == jobs.UNKNOWN or (status < 0 and self._killed[number] < _RETRIES and not self.stop)
            if found.state == "stopped" and is_lost:  # first of all, so that what comes next knows its result
                self._killed[number] += status < 0
                self.to_resume.insert(0, own.trial)
        if not self.stop and time.monotonic() >= self._deadline:
            self._pass_on(TIME_IS_UP)

    def _answer(self, trial: Trial) -> None:
        """Answer a job's question at a rung."""
        folder = Path(trial.folder)
        if self.pruner is None or (asks := rungs.read(folder / rungs.ASKS)) is None:
            return
        rung = asks["rung"]
        if rung not in trial.reached:
            trial.reached[rung] = asks["value"]
            trial.facts |= {"metric": asks["metric"], "direction": asks["direction"]}
            goes_on = self.pruner.goes_on(trial, rung, self.journal.trials, self.direction)
            self.journal.add("rung", number=trial.number, goes_on=goes_on, **asks)
        rungs.write(folder / rungs.ANSWERS, {"rung": rung, "goes_on": rung in trial.promoted})
        (folder / rungs.ASKS).unlink()

    def _note_end(self, trial: Trial, found: jobs.Outcome, seconds: float) -> None:
        self.journal.add("end", number=trial.number, seconds=round(seconds, 3), **asdict(found))
        facts, value = trial.facts, trial.finite("best_objective")
        best = "" if value is None else f", best {facts['metric']} {value:.4g} at step {facts['best_step']}"
        steps = f" at step {facts['steps']}" if trial.state in ("paused", "stopped") and "steps" in facts else ""
        log = Path(trial.folder) / jobs.LOG
        why = f": {trial.error}{f'; see {shown(log)}' * log.exists()}" if trial.error else ""
        self._say(f"job {trial.number} {trial.state}{steps}{best}{why}")
        if self.settings.storage and self.direction:
            self._copy_to_storage(self.settings.storage)
        if trial.state == "finished":
            leaderboard.tell_tensorboard(Path(trial.folder), dict(zip(self.journal.keys, trial.values, strict=True)))

    def _copy_to_storage(self, url: str) -> None:
        """The jobs do not depend on it: an error is said, and the next copy has all."""
        try:
            samplers.copy_to_storage(url, str(self.folder), self.composer.space, self.journal.trials, self.direction)
        except UserError as error:
            self._say(str(error))

    # Signals and the terminal

    def _handle(self, number: int, frame: object) -> None:
        """Prints nothing: a signal may come in the middle of another print."""
        if self.stop and time.monotonic() - self._stopped_at < ECHO:
            return
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        is_second = self.stop not in (0, TIME_IS_UP)
        self.stop, self._stopped_at = number, time.monotonic()
        for own in self.running.values():
            own.job.stop()
        if is_second or self.launcher:
            os.write(1, f"Continue with:\n  python -m trainapp continue {shown(self.folder)}\n".encode())
            os._exit(128 + number if is_second else TO_BE_CONTINUED)

    def _show_progress(self) -> None:
        if self.bar.disable or time.monotonic() - self._shown_at < 1.0:
            return
        trials, self._shown_at = self.journal.trials, time.monotonic()
        counts = [
            (state, sum(own.state == state for own in trials)) for state in ("finished", "running", "paused", "failed")
        ]
        best = leaderboard.best_of(leaderboard.rows_of(self.journal, is_live=False))
        text = ", ".join(f"{count} {state}" for state, count in counts if count)
        self.bar.set_description_str(f"{text}{f'; best {best}' if best else ''}")

    def _say(self, text: str) -> None:
        if self.bar.disable:
            print(text, flush=True)
        else:
            tqdm.write(text)


def _threads(slot: Slot) -> int | None:
    """Threads of a new trial: as many as it has cores, unless the user has set a number."""
    if given := os.environ.get("OMP_NUM_THREADS"):
        return int(given.partition(",")[0])
    return len(slot.cores) if slot.cores else None


def _deadline(settings: Sweep) -> float:
    """The `time.monotonic()` of `sweep.max_time`."""
    if settings.max_time is None:
        return math.inf
    if settings.max_time == "auto":
        return time.monotonic() + slurm_end("sweep.max_time") - time.time()
    return time.monotonic() + (parse_time(settings.max_time) or 0.0)
