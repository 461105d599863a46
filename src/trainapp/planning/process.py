"""Plans in a separate process: some paths of torch abort, a plan sets global switches, and a model may keep tensors of
a traced step. Imports no torch in the caller.
"""

import gc
import json
import logging
import os
import pickle
import pkgutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from trainapp.config import schema
from trainapp.config.schema import Config
from trainapp.errors import UserError, summary_of
from trainapp.units import bytes_text

if TYPE_CHECKING:
    from trainapp.parallel.ranks import Ranks
    from trainapp.techniques.checkpointing import Mode

# Tried in this order: a trace; for an absent GPU, a trace on the CPU with CUDA's rules; real steps; a trace with
# made-up answers when the model reads values.
METHODS = ("traced", "traced as on the CPU", "measured", "made up")
_PLANNER = "trainapp.planning.planner.plan_and_draw"
_MEASUREMENTS = "trainapp.planning.ranking.add_measurements"
# Variables that tell a process its rank: the planner would wait for the others.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = 120.0  # seconds that a run waits for its modes
Facts = dict[str, Any]  # the content of plan.json
OnReport = Callable[[Facts], None]  # called with what `report` sends
POLL_SECONDS = 0.1  # between looks at what the planner's process has reported
log = logging.getLogger(__name__)
_reports: list[IO[str]] = []  # of the planner's process: the file in which its parent reads reports


@dataclass
class MemoryPlan:
    """The content of plan.json. Sizes are samples per rank, bytes are per rank. docs/memory.md explains the fields."""

    method: str | None  # None if no estimator succeeded; `notes` then have the reasons
    margin: float | None = None
    notes: list[str] = field(default_factory=list)
    peak_bytes: int | None = None
    phase: str | None = None
    module: str | None = None
    phases: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, Any] | None = None
    micro_size: int | None = None
    largest_micro_size: int | None = None
    limit_bytes: int | None = None
    modes: Sequence[str] | None = None  # each block's, with `activation_checkpointing=auto`
    techniques: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    measured_bytes: int | None = None  # for training, with `plan.measure`
    step_seconds: float | None = None  # for training, with `plan.measure`
    seconds: float | None = None


class NothingFits(UserError):
    """A plan knows that no micro-batch fits, whatever the blocks' modes."""


class NoAnswer(Exception):
    """The planner's process failed, died or took too long, as the message says."""


# --- plans


def plan_in_subprocess(
    config: Config, picture: Path | None = None, only_modes: bool = False, on_report: OnReport | None = None
) -> Facts:
    """Return the plan of a configuration, as plain values: see `planner.plan`. Takes some seconds.

    If no method succeeds, `method` is None and `notes` have the reasons. Raises UserError for mistakes in the
    configuration.

    Args:
        config: the configuration.
        picture: also draw the step to this PNG.
        only_modes: only choose the blocks' modes, within PATIENCE.
        on_report: called with the parts of the plan while it is made: see `planner.plan`.
    """
    deadline = None
    if only_modes:
        deadline = time.monotonic() + PATIENCE

    # The first method that succeeds.
    facts: Facts | None = None
    reasons: list[str] = []  # why earlier methods did not
    for method in METHODS:
        if method == "traced as on the CPU" and config.plan.device is None:
            continue
        try:
            arguments = (config, picture, only_modes, method)
            facts = _call_planner(_PLANNER, *arguments, deadline=deadline, on_report=_with_reason(on_report, reasons))
            break
        except NoAnswer as error:
            reasons.append(str(error))
    if facts is None:
        distinct_reasons = list(dict.fromkeys(reasons))
        return asdict(MemoryPlan(None, notes=distinct_reasons))
    _add_reason(facts, reasons)

    # Real steps, which this machine's device makes.
    if config.plan.measure and facts["micro_size"]:
        on_this_machine = replace(config, plan=replace(config.plan, device=None))
        try:
            return _call_planner(_MEASUREMENTS, on_this_machine, facts, deadline=deadline)
        except NoAnswer as error:
            facts["notes"].append(f"not measured: {error}")
    return facts


def _add_reason(facts: Facts, reasons: list[str]) -> None:
    """Note in the plan why it was not traced, if an earlier method failed."""
    if reasons:
        facts["notes"] = [f"not traced: {reasons[0]}", *facts["notes"]]


def _with_reason(on_report: OnReport | None, reasons: list[str]) -> OnReport | None:
    """Return `on_report`, for plans with a note on why they were not traced."""
    if on_report is None:
        return None

    def add_reason_and_report(part: Facts) -> None:
        if "plan" in part:
            _add_reason(part["plan"], reasons)
        on_report(part)

    return add_reason_and_report


def _call_planner(
    function: str, config: Config, *arguments: Any, deadline: float | None, on_report: OnReport | None = None
) -> Facts:
    """Return the result of `function(config, *arguments)`, called in a separate process.

    Args:
        function: its dotted name.
        config: the configuration. If it names a device, tensors only claim to be on it, and the process sees none.
        arguments: the function's.
        deadline: in time.monotonic(); None waits.
        on_report: see `call_in_subprocess`.
    """
    patience = None
    if deadline is not None:
        patience = max(0.0, deadline - time.monotonic())
    sees_devices = config.plan.device is None
    facts: Facts = call_in_subprocess(
        function, config, *arguments, patience=patience, sees_devices=sees_devices, on_report=on_report
    )
    return facts


# --- modes of activation checkpointing


def has_open_modes(config: Config) -> bool:
    """Return whether `activation_checkpointing=auto` leaves the blocks' modes to a plan."""
    settings = config.activation_checkpointing
    return settings.mode == "auto" and settings.modes is None


def with_checkpointing_modes(config: Config, ranks: "Ranks") -> Config:
    """Return the run's configuration with a mode for each block, if they are open: all blocks are recomputed if memory
    cannot be estimated. Takes some seconds. Collective.

    Raises UserError for a model without blocks, for mistakes in the configuration, and, as NothingFits, if certainly no
    micro-batch fits, on all ranks.
    """
    from trainapp.parallel.ranks import answered_by_rank_zero

    if not has_open_modes(config):
        return config
    modes = answered_by_rank_zero(ranks, lambda: _planned_modes(config, ranks.world_size))
    settings = config.activation_checkpointing
    if modes is None:
        return replace(config, activation_checkpointing=replace(settings, mode="full"))
    return replace(config, activation_checkpointing=replace(settings, modes=modes))


def _planned_modes(config: Config, world_size: int) -> "list[Mode] | None":
    """Choose modes for this process's device, which the planner's process need not see. None without an estimate."""
    from trainapp.assembly.resolved_targets import choose_device
    from trainapp.planning.absent_gpu import with_device_spec

    device = choose_device(config.train.device)
    config = replace(config, plan=schema.PlanSettings(techniques=False, world=world_size))
    if device.type == "cuda":
        config = with_device_spec(config, device)

    facts = plan_in_subprocess(config, only_modes=True)
    if facts["method"] is None:
        reasons = "; ".join(facts["notes"])
        log.warning("activation_checkpointing=auto: no estimate (%s); all blocks are recomputed, as with full", reasons)
        return None
    if _cannot_fit(facts):
        limit = bytes_text(facts["limit_bytes"])
        setting = "memory.limit" if config.memory.limit is None else f"memory.limit={config.memory.limit}"
        raise NothingFits(
            f"activation_checkpointing=auto: no micro-batch fits {limit}. The lowest peak, of a micro-batch of "
            f"{facts['micro_size']}, is {bytes_text(facts['peak_bytes'])} in {facts['phase'].replace('_', ' ')} "
            f"(traced, +-{100 * facts['margin']:.0f}%); raise {setting}, or add what `mode=plan` lists. To train "
            "nevertheless, use activation_checkpointing=full"
        )
    modes: list[Mode] = facts["modes"]
    log.info("activation checkpointing: %s, as planned (%s)", modes_text(modes), facts["method"])
    return modes


def _cannot_fit(facts: Facts) -> bool:
    """Return whether the plan of modes knows that a run would run out of memory: a trace without reservations says so
    by twice its margin.
    """
    if facts["method"] != "traced" or facts["largest_micro_size"] != 0 or facts["notes"]:
        return False
    lowest: float = facts["peak_bytes"] * (1 - 2 * facts["margin"])
    return lowest > facts["limit_bytes"]


def modes_text(modes: Sequence[str]) -> str:
    """Return the number of blocks per mode: `2 full, 4 none`."""
    return ", ".join(f"{count} {mode}" for mode, count in Counter(modes).items())


# --- the separate process


def call_in_subprocess(
    function: str,
    *arguments: Any,
    patience: float | None = None,
    sees_devices: bool = True,
    on_report: OnReport | None = None,
) -> Any:
    """Return the result of a function, called in a separate process. Importing torch there takes seconds.

    Raises NoAnswer, and the function's UserError.

    Args:
        function: its dotted name.
        arguments: pickled, as is the answer.
        patience: seconds; None waits.
        sees_devices: False hides CUDA, whose context would take some hundred MiB of a device that may be full.
        on_report: called in this process with what the function sends by `report`.
    """
    # Files rather than pipes, whose end comes only after every process that the function has left behind.
    with TemporaryFile() as request, TemporaryFile() as answer, TemporaryFile() as errors, TemporaryFile() as reports:
        pickle.dump((function, arguments, reports.fileno()), request)
        request.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                env=_environment(sees_devices),
                stdin=request,
                stdout=answer,
                stderr=errors,
                pass_fds=[reports.fileno()],
            )
        except OSError as problem:  # out of memory, or of processes
            raise NoAnswer(f"the planner's process cannot start: {problem}") from None
        try:
            returncode = _wait(process, patience, reports.fileno(), on_report)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the planner's process took longer than {patience:.0f} s") from None

        # Without an answer, the last line of its errors says why: mostly the message of an exception.
        answer.seek(0)
        content = answer.read()
        if returncode or not content:
            errors.seek(0)
            error_text = errors.read().decode(errors="replace").strip()
            last_line = error_text.rpartition("\n")[2]
            raise NoAnswer(_death(returncode, last_line))

    outcome = pickle.loads(content)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _wait(process: "subprocess.Popen[bytes]", patience: float | None, reports: int, on_report: OnReport | None) -> int:
    """Return the exit code of the process, and pass on its reports as they come. Ends it on any error.

    Raises TimeoutExpired after `patience` seconds.
    """
    ends_at = None
    if patience is not None:
        ends_at = time.monotonic() + patience
    position = 0  # in the file of the reports
    with process:
        try:
            while True:
                try:
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if ends_at is not None and time.monotonic() > ends_at:
                        raise
                finally:
                    if on_report is not None:
                        position = _pass_on(reports, position, on_report)
        except BaseException:
            process.kill()
            raise


def _pass_on(reports: int, position: int, on_report: OnReport) -> int:
    """Pass on the complete lines from a position of the file on. Return the position after them."""
    # Both processes share the file's offset, which is where the other one writes.
    content = os.pread(reports, os.fstat(reports).st_size - position, position)
    complete, newline, _ = content.rpartition(b"\n")
    for line in complete.splitlines():
        on_report(json.loads(line))
    return position + len(complete) + len(newline)


def report(part: Facts) -> None:
    """Send a part of the result to the process that waits for it, as JSON; no effect outside of the planner's."""
    for file in _reports:
        file.write(json.dumps(part) + "\n")
        file.flush()


def _environment(sees_devices: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # users' modules, too
    if not sees_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _death(returncode: int, last_line: str) -> str:
    """Return how the process ended, in words, with the last line of its errors."""
    text = "the planner's process ended with "
    if returncode < 0:
        text += f"signal {-returncode}"
    else:
        text += f"exit code {returncode}"
    if last_line:
        text += f": {last_line}"
    return text


def main() -> None:
    """Run in the process that `call_in_subprocess` starts: answer the request on stdin, on stdout, with the function's
    result, its UserError, or NoAnswer for any other error.
    """
    # The answer alone goes to stdout: users' modules and data sets may print.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    name, arguments, reports = pickle.load(sys.stdin.buffer)
    _reports.append(os.fdopen(reports, "w"))
    logging.basicConfig(level=logging.ERROR)  # the run itself will warn
    function = pkgutil.resolve_name(name)
    gc.freeze()  # walking all of torch in every collection took a tenth of a large plan's time
    try:
        outcome = function(*arguments)
    except (UserError, NoAnswer) as error:
        outcome = error
    except Exception as error:
        log.debug("%s: no answer", name, exc_info=True)
        outcome = NoAnswer(summary_of(error))

    pickle.dump(outcome, answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # torch's own end may abort after a trace
