"""The sweep: starts jobs as slots become free, answers their questions at rungs, and writes the journal.

Whatever kills it, the same command continues it: finished trials stay, running ones are waited for, interrupted ones
resume from their checkpoints, and the rest is proposed as if nothing had happened.
"""

import contextlib
import datetime
import json
import math
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from trainapp.config import command_line, excludes, resume_rules
from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import json_object, shown, strict_json
from trainapp.hooks import rungs
from trainapp.launch import environment, launch
from trainapp.signals import ECHO, TIME_IS_UP, TO_BE_CONTINUED, deadline_of, handled_by, how_to_quit, named
from trainapp.sweep import jobs, leaderboard, rows, samplers
from trainapp.sweep.composing import Composed, Composer, settings_of
from trainapp.sweep.jobs import Job, Outcome, Slot
from trainapp.sweep.journal import Journal, Trial, goals_of
from trainapp.sweep.pruner import Pruner
from trainapp.sweep.space import Dimension, Space, parse
from trainapp.tracking.terminal import is_live
from trainapp.units import bytes_text

_POLL = 0.1  # seconds between looks at the running jobs
_RETRIES = 3  # starts of a job that was killed, as by a machine without memory, before it has failed
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_MAY_CHANGE = ("trials", "parallel", "pack", "max_time", "max_failures", "retry_failed", "storage")


def run(context: HydraContext, function: TaskFunction, composed: DictConfig, arguments: list[str]) -> None:
    """Do or continue the sweep of these overrides. Raises UserError for mistakes, and SystemExit with the status: 1 if
    jobs failed, 75 if it was interrupted and the same command continues it.
    """
    environment.require_one_process("multirun", "start `python -m trainapp -m ...` once: it starts its jobs itself")
    settings, space = settings_of(composed), parse(arguments, context.config_loader)
    composer = Composer(context.config_loader, composed, space)
    propose = samplers.build(settings, space)
    with launch.locked(str(composer.folder)):
        journal = Journal(composer.folder)
        started = journal.first.get("started", datetime.datetime.now().isoformat(timespec="seconds"))
        os.environ[environment.SWEEP_STARTED] = started
        environment.use_time_of_sweep()
        asked = {name: value for name, value in asdict(settings).items() if name not in _MAY_CHANGE} | space.to_dict()
        digests: dict[str, str] = {}
        is_known, command = journal.asked.get("asked") == asked, _command(composed)
        if journal.first:
            _require_none(_differences(journal.first["asked"], asked), composer.folder)
        if not is_known:
            digests = composer.check({own.values: own.number for own in journal.trials})
            digests = digests if settings.sampler == "grid" else {}  # the numbers of other jobs are not yet known
            names = [" ".join(space.swept(own.values)) for own in journal.trials if digests]
            changed = [name for name in names if journal.digests.get(name) != digests[name]]
            _require_none([f"the configuration of {name}" for name in changed], composer.folder)
        values = tuple(journal.first.get("values", next(space.covering())))
        config = composer.job(0, values).config
        if journal.first:
            _require_none(_changes(journal, config), composer.folder)
        if settings.pruner != "none":
            _require_pausable(settings, config)
        _require_comparable(settings, config)
        if not is_known or journal.asked["command"] != command:
            facts = {"asked": asked, "command": command, "cwd": os.getcwd(), "values": values, "started": started}
            plain = json.loads(strict_json(config.to_dict(), default=str))
            journal.add("asked" if journal.first else "sweep", **facts, digests=digests, config=plain)
        launcher = None
        if composed.hydra.launcher._target_ != _BASIC:
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=function, config=composed
            )
        status = _Sweeper(settings, composer, propose, journal, config, launcher).run()
    if status:
        raise SystemExit(status)


def _command(composed: DictConfig) -> list[str]:
    """The arguments of the command line, without the sweep's directory."""
    both: Any = OmegaConf.to_container(composed.hydra.overrides, resolve=False)
    skipped = ("hydra.sweep.dir=", "hydra.mode=", "sweep.retry_failed=")  # that once
    given = [text for text in (*both["task"], *both["hydra"]) if not text.startswith(skipped)]
    return [*command_line.flags(composed.hydra), "-m", *given]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What makes it another sweep. A grid may have grown."""
    old, new = _parts(before), _parts(now)
    if now["sampler"] == "grid":
        for key in old.keys() & new.keys():
            was, own = old[key], new[key]
            if isinstance(was, Dimension) and isinstance(own, Dimension) and {*was.values} <= {*own.values}:
                old[key] = own
    found = [
        f"{name}: {old.get(name, 'not given')} before, {new.get(name, 'not given')} now"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    return found or [f"the order of {', '.join(old)}"] * ([*old] != [*new])


def _parts(asked: dict[str, Any]) -> dict[str, Any]:
    """What was asked for by name: the settings of the sweep, of all jobs, and those that are swept."""
    space = Space.from_dict(asked)
    found = {f"sweep.{name}": value for name, value in asked.items() if name not in ("fixed", "dimensions")}
    found |= dict(sorted(text.partition("=")[::2] for text in space.fixed))
    return found | {of.key: of for of in space.dimensions}


def _changes(journal: Journal, config: Config) -> list[str]:
    """What has changed in the configuration of the first job since the sweep began."""
    return list(map(str, resume_rules.changes(journal.first["config"], config.to_dict())))


def _require_none(differences: list[str], folder: Path) -> None:
    """Raises UserError if there are any."""
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise UserError(
            f"hydra.sweep.dir={folder}: this directory belongs to another sweep, or its files have changed:\n{lines}\n"
            "choose another directory, or change them back; a grid may get more values, and "
            f"{', '.join(f'sweep.{name}' for name in _MAY_CHANGE)} may change"
        )


def _require_pausable(settings: Sweep, config: Config) -> None:
    if not config.activity.trains or not config.checkpointing.save or config.every.eval is None:
        raise UserError(
            f"sweep.pruner={settings.pruner}: pauses runs at an evaluation and continues them from a checkpoint; it "
            "needs mode=train, every.eval and checkpointing.save=true"
        )


def _require_comparable(settings: Sweep, config: Config) -> None:
    """Raise UserError for settings that compare trials where no evaluation is better than another."""
    if settings.sampler not in ("grid", "random"):
        name = settings.sampler if isinstance(settings.sampler, str) else settings.sampler.target
        excludes.require_best(config, f"sweep.sampler={name}")
    if settings.pruner != "none":
        excludes.require_best(config, f"sweep.pruner={settings.pruner}")
    if settings.storage is not None:
        excludes.require_best(config, f"sweep.storage={settings.storage}")


@dataclass
class _Running:
    """bytes: what it was given of a shared device; infinite if unknown."""

    trial: Trial
    job: Job
    slot: Slot
    bytes: float = math.inf


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
        self.packs = settings.pack and launcher is None and config.activity.trains
        self.running: dict[int, _Running] = {}
        count = 1 if settings.parallel == "auto" else int(settings.parallel)
        self.slots = [Slot()] * count if launcher else jobs.slots(settings.parallel, config, self.packs)
        retried = ("new", "stopped", "failed", "infeasible") if settings.retry_failed else ("new", "stopped")
        promoted = [own for own in journal.trials if own.state == "paused" and not own.is_held]  # and then killed
        self.to_resume = [own for own in journal.trials if own.state in retried or own in promoted]
        self.stop, self._stopped_at, self._is_exhausted = 0, 0.0, False
        self._deadline = deadline_of("sweep.max_time", settings.max_time, time.time())
        self._shown_at, self._waits = 0.0, False
        self._killed: Counter[int] = Counter()  # by trial
        self._needs: dict[int, jobs.Need | None] = {}  # by trial
        self.bar = tqdm(bar_format="{desc}", disable=not is_live())

    @property
    def direction(self) -> str:
        """max or min; empty while no trial has said. Raises UserError if trials differ where they are compared."""
        goals = goals_of(self.journal.facts)
        if len(goals) > 1 and (self.pruner or self.settings.sampler != "grid"):
            found = ", ".join(" ".join(goal) for goal in sorted(goals))
            raise UserError(f"objective: jobs have different ones ({found}), which cannot be compared; set objective")
        return next(iter(goals))[1] if len(goals) == 1 else ""

    def run(self) -> int:
        """Until nothing is left or a signal ends it. Returns the exit status."""
        self._print_opening()
        with handled_by(self._handle), contextlib.closing(self.bar):
            try:
                self._work()
            except Exception:  # of the sweep itself: its jobs save and end
                for own in self.running.values():
                    own.job.terminate()
                while any(own.job.poll() is None for own in self.running.values()):
                    time.sleep(_POLL)
                print(self._how_to_continue, flush=True)
                raise
        trials, states = self.journal.trials, Counter(own.state for own in self.journal.trials)
        if trials:
            leaderboard.show(self.folder)
        if self._has_failed_often():
            print(f"sweep.max_failures={self.settings.max_failures}: no more jobs were started")
        if states["failed"]:
            print(f"{states['failed']} failed; sweep.retry_failed=true runs them again when the sweep is continued")
        if states["paused"]:
            print(f"{states['paused']} paused; `trainapp continue {shown(self.folder)}/NUMBER` trains one to its end")
        if self.count > len(trials) and self.settings.sampler != "grid":
            why = "sweep.sampler: found no other configuration, and " * self._is_exhausted
            print(f"{why}{self.count - len(trials)} jobs have not begun")
        if self.stop or states["new"] or states["stopped"] or states["running"]:
            print(self._how_to_continue, flush=True)
            return TO_BE_CONTINUED
        return int(states["failed"] > 0)

    def _work(self) -> None:
        self._find_running()
        has_said = False
        while True:
            self._collect()
            has_begun = not self.stop and self._begin_next()
            if self.stop and not has_said:
                has_said = True
                waits = "the launcher's jobs are left to run" if self.launcher else "the running jobs save and end"
                if self.stop == TIME_IS_UP:
                    self._say(f"sweep.max_time: {waits}")
                else:
                    self._say(f"{named(self.stop)}: {waits}; {how_to_quit(self.stop)}")
            if not (self.running or has_begun):
                return
            self._show_progress()
            time.sleep(0.0 if has_begun else _POLL)

    # What comes next

    def _begin_next(self) -> bool:
        """Start a job if a slot is free. Returns whether there was one."""
        is_full = len(self.running) >= len(self.slots) or self._waits or self._has_failed_often()
        trial = None if is_full else self._next()
        if trial is not None:
            self._start(trial)
        return trial is not None

    def _has_failed_often(self) -> bool:
        most = self.settings.max_failures
        return most is not None and sum(own.state == "failed" for own in self.journal.trials) >= most

    def _next(self) -> Trial | None:
        if self.to_resume:
            return self.to_resume.pop(0)
        if (trial := self._promoted()) is not None:
            return trial
        trials, number = self.journal.trials, len(self.journal.trials)
        is_over = self._is_exhausted or number >= (self.settings.trials or math.inf)
        found = None if is_over else self.propose(number, trials, self.direction)
        if found is not None:
            self.journal.add("trial", number=number, values=found[0], attributes=found[1])
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
        try:
            job = self.composer.job(trial.number, trial.values)
            self._require_unchanged(job)
        except UserError as error:
            return self._note_end(trial, Outcome("failed", "; ".join(str(error).splitlines()), {}))
        slot, need = self._free_slots()[0], None
        if self.packs:
            need = self._need(job, slot)
            fitting = [own for own in self._free_slots() if self._has_room(own, need)]
            if not fitting or self.stop:
                return self._put_back(trial)
            slot = fitting[0]
            if need is not None and need.is_infeasible:
                size = f"{bytes_text(need.bytes)} of {bytes_text(need.room / jobs.SHARE)}"
                why = f"out of memory by its plan at micro-batch 1: it needs {size}"
                return self._note_end(trial, Outcome("infeasible", why, {}))
        given, more = self._share(job, slot, need)
        threads = trial.threads if trial.threads is not None else slot.threads
        self.journal.add("start", number=trial.number, threads=threads, folder=os.path.relpath(job.folder, self.folder))
        self._prepare_rungs(trial, job.folder)
        does = "continues" if (job.folder / "checkpoints").exists() else "starts"
        swept = " ".join(self.composer.space.swept(trial.values)).replace("+", "")
        self._say(f"job {trial.number} {does}{f' on {slot}' * bool(str(slot))}{f': {swept}' * bool(swept)}")
        process = self._process(job, slot, threads, more)
        self.running[trial.number] = _Running(trial, process, slot, given)
        if self.stop:  # a signal during the start
            process.terminate()
        return None

    def _require_unchanged(self, job: Composed) -> None:
        """Raises UserError if configuration files have changed: the job would not be like those that have run."""
        known = self.journal.digests.get(job.name)
        if known != job.digest:
            first = self.composer.job(0, tuple(self.journal.first["values"]))
            changes = _changes(self.journal, first.config)
            if known or changes:
                what = "; ".join(changes) or "other files of this job"
                raise UserError(f"the configuration has changed since the sweep began: {what}; change it back")

    def _free_slots(self) -> list[Slot]:
        taken = [own.slot for own in self.running.values()]
        return [own for own in self.slots if self.slots.count(own) > taken.count(own)]

    def _put_back(self, trial: Trial) -> None:
        """Until a job ends. What a plan found infeasible beside others is planned once more."""
        self.to_resume.insert(0, trial)
        self._waits = True
        if (need := self._needs[trial.number]) is not None and need.is_infeasible:
            del self._needs[trial.number]

    def _share(self, job: Composed, slot: Slot, need: jobs.Need | None) -> tuple[float, list[str]]:
        """The bytes that the job is given of its device, and the overrides that tell it. need: by `sweep.pack`."""
        if not self.packs:
            return math.inf, [] if self.launcher else slot.memory(job.config)
        if need is None or need.bytes > need.room:
            return math.inf, []
        has_eval_size = job.config.batch.eval_micro_size != "auto"  # of which the plan knows nothing
        own = [] if has_eval_size else [f"batch.eval_micro_size={need.micro_size}"]
        return need.bytes, [f"memory.limit={need.bytes}", *own]

    def _need(self, job: Composed, slot: Slot) -> jobs.Need | None:
        if job.number not in self._needs:
            folder = job.folder / "plan"
            command = self.composer.command(job, ["mode=plan", "plan.techniques=false"], folder)
            self._needs[job.number] = jobs.need(command, folder, slot)
        return self._needs[job.number]

    def _has_room(self, slot: Slot, need: jobs.Need | None) -> bool:
        """Whether the job fits beside those on the slot's device. One without an estimate, or that needs all of it, has
        the device alone.
        """
        used = sum(own.bytes for own in self.running.values() if own.slot.gpus == slot.gpus)
        return used == 0 or (need is not None and used + need.bytes <= need.room)

    def _process(self, job: Composed, slot: Slot, threads: int | None, more: list[str]) -> Job:
        if self.launcher is not None:
            launcher = self.launcher
            return jobs.Launched(lambda: launcher.launch([job.overrides], initial_job_idx=job.number))
        if self.pruner and not job.config.chooses("checkpointing.keep_last"):
            more = [*more, "checkpointing.keep_last=1"]  # of paused runs there may be many
        return jobs.start(self.composer.command(job, more), more, job.folder, slot, threads)

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
        for folder, job in jobs.orphans(lost).items():
            free = self._free_slots() or self.slots
            slot = next((own for own in free if own.gpus and ",".join(own.gpus) == job.gpus), free[0])
            self.running[lost[folder].number] = _Running(lost[folder], job, slot)
            if job.poll() is None:
                self._say(f"job {lost[folder].number} still runs")

    def _collect(self) -> None:
        for number, own in list(self.running.items()):
            status = own.job.poll()
            self._answer(own.trial)
            if status is None:
                continue
            del self.running[number]
            self._waits = False
            (Path(own.trial.folder) / rungs.RUNGS).unlink(missing_ok=True)  # who continues it by hand asks no sweep
            found = jobs.outcome(own.trial, self.config.mode, status, getattr(own.job, "error", ""))
            if self.stop and found.state == "stopped":  # as asked, also where it had not begun to hear signals
                found = found._replace(error="")
            is_lost = found.state == "stopped" and status < 0 and not self.stop  # or an orphan of an earlier process
            self._killed[number] += is_lost and status != jobs.UNKNOWN
            if is_lost and self._killed[number] > _RETRIES:
                found, is_lost = found._replace(state="failed", error=f"{found.error}, {_RETRIES + 1} times"), False
            self._note_end(own.trial, found)
            if is_lost:  # first of all, so that what comes next knows its result
                self.to_resume.insert(0, own.trial)
        if not self.stop and time.monotonic() >= self._deadline:
            self._pass_on(TIME_IS_UP)

    def _answer(self, trial: Trial) -> None:
        """Answer a job's question at a rung."""
        folder = Path(trial.folder)
        if self.pruner is None or not (asks := json_object(folder / rungs.ASKS)):
            return
        if (rung := asks["rung"]) not in trial.reached:
            self.journal.add("rung", number=trial.number, **asks)
        if trial.is_held and self.pruner.passes(trial, rung, self.journal.trials, self.direction):
            self.journal.add("promote", number=trial.number, rung=rung)
        rungs.write(folder / rungs.ANSWERS, {"rung": rung, "passes": rung in trial.passed})
        (folder / rungs.ASKS).unlink()

    def _note_end(self, trial: Trial, found: Outcome) -> None:
        self.journal.add("end", number=trial.number, **found._asdict())
        facts, value = trial.facts, trial.facts.get("best_objective")
        best = "" if value is None else f", best {facts['metric']} {value:.4g} at step {facts['best_step']}"
        steps = f" at step {facts['steps']}" if trial.state in ("paused", "stopped") and "steps" in facts else ""
        log = Path(trial.folder) / jobs.LOG
        why = f": {trial.error}{f'; see {shown(log)}' * (trial.folder != '' and log.exists())}" if trial.error else ""
        self._say(f"job {trial.number} {trial.state}{steps}{best}{why}")
        if self.settings.storage and self.direction:
            trials, space = self.journal.trials, self.composer.space
            try:
                samplers.copy_to_storage(self.settings.storage, str(self.folder), space, trials, self.direction)
            except UserError as error:  # the jobs do not depend on it, and the next copy has all
                self._say(str(error))

    # Signals and the terminal

    def _handle(self, number: int, frame: object) -> None:
        """Prints nothing: a signal may come in the middle of another print."""
        if not self.stop or time.monotonic() - self._stopped_at >= ECHO:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        is_second = self.stop not in (0, TIME_IS_UP)
        self.stop, self._stopped_at = number, time.monotonic()
        for own in self.running.values():
            own.job.terminate()
        if is_second or self.launcher:
            os.write(1, f"{self._how_to_continue}\n".encode())
            os._exit(128 + number if is_second else TO_BE_CONTINUED)

    @property
    def _how_to_continue(self) -> str:
        return f"Continue with:\n  python -m trainapp continue {shown(self.folder)}"

    @property
    def count(self) -> float:
        """How many jobs the sweep has; of an endless space, `sweep.trials`."""
        return min(self.composer.space.size, self.settings.trials or math.inf)

    def _print_opening(self) -> None:
        at_a_time = f"{len(self.slots)} at a time" if len(self.slots) > 1 else "one at a time"
        share = "" if self.packs else "".join(f", each with {text}" for text in self.slots[0].memory(self.config))
        states = Counter(own.state for own in self.journal.trials)
        known = "".join(f"; {number} {state}" for state, number in states.items())
        jobs_text = f"{self.count} job{'s' * (self.count != 1)}"
        print(f"sweep of {jobs_text}, {'at most ' * self.packs}{at_a_time}{share}, in {shown(self.folder)}{known}")
        print("\n".join(f"  {of.key}: {of}" for of in self.composer.space.dimensions), flush=True)

    def _show_progress(self) -> None:
        if self.bar.disable or time.monotonic() - self._shown_at < 1.0:
            return
        self._shown_at, counts = time.monotonic(), Counter(own.state for own in self.journal.trials)
        best = leaderboard.best_of(rows.of_sweep(self.journal, is_live=False))
        states = ("finished", "running", "paused", "failed")
        text = ", ".join(f"{counts[name]} {name}" for name in states if counts[name])
        self.bar.set_description_str(f"{text} of {self.count}{f'; best {best}' if best else ''}")

    def _say(self, text: str) -> None:
        if self.bar.disable:
            print(text, flush=True)
        else:
            tqdm.write(text)
