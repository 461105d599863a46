"""Plans in a separate process: some paths of torch abort, a plan sets global switches, and a model may keep tensors of
a traced step. Imports no torch in the caller.
"""

import gc
import logging
import os
import pickle
import pkgutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from trainapp.config import schema
from trainapp.config.schema import Config
from trainapp.errors import UserError, summary_of

if TYPE_CHECKING:
    from trainapp.parallel.ranks import Ranks

# Tried in this order: a trace; for an absent GPU, a trace on the CPU with CUDA's rules; real steps; a trace with
# made-up answers when the model reads values.
METHODS = ("traced", "traced as on the CPU", "measured", "made up")
_PLANNER = "trainapp.planning.planner.answer"
# Variables that tell a process its rank: the planner would wait for the others.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = 120.0  # seconds that a run waits for its modes
log = logging.getLogger(__name__)


@dataclass
class MemoryPlan:
    """The content of plan.json. Sizes are samples per rank, bytes are per rank. docs/memory.md explains the fields.

    method: None if no estimator succeeded; `notes` then have the reasons. modes: each block's mode, with
    `activation_checkpointing=auto`. measured_bytes, step_seconds: for training, with `plan.measure`.
    """

    method: str | None
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
    modes: Sequence[str] | None = None
    techniques: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    measured_bytes: int | None = None
    step_seconds: float | None = None
    seconds: float | None = None


class NoAnswer(Exception):
    """The planner's process failed, died or took too long, as the message says."""


def ask(config: Config, picture: Path | None = None, only_modes: bool = False) -> dict[str, Any]:
    """The plan of a configuration, as plain values: see `planner.plan`. Takes some seconds.

    picture: also draw the step to this PNG. only_modes: only choose the blocks' modes, within PATIENCE. Raises
    UserError for mistakes in the configuration. If no method succeeds, `method` is None and `notes` have the reasons.
    """
    deadline = time.monotonic() + PATIENCE

    def call(function: str, own: Config, *arguments: Any) -> Any:
        left = max(0.0, deadline - time.monotonic()) if only_modes else None
        # For a named device, tensors only claim to be on it.
        return call_in_subprocess(function, own, *arguments, patience=left, sees_devices=own.plan.device is None)

    reasons = list[str]()
    for method in METHODS:
        if method == "traced as on the CPU" and config.plan.device is None:
            continue
        try:
            facts: dict[str, Any] = call(_PLANNER, config, picture, only_modes, method)
            break
        except NoAnswer as error:
            reasons.append(str(error))
    else:
        return asdict(MemoryPlan(None, notes=list(dict.fromkeys(reasons))))
    facts["notes"] = [*(f"not traced: {reason}" for reason in reasons[:1]), *facts["notes"]]
    if config.plan.measure and facts["micro_size"]:
        try:
            here = replace(config, plan=replace(config.plan, device=None))
            return call("trainapp.planning.ranking.measured", here, facts)
        except NoAnswer as error:
            facts["notes"].append(f"not measured: {error}")
    return facts


def with_modes(config: Config, ranks: "Ranks") -> Config:
    """The run's configuration with a mode for each block, if `activation_checkpointing=auto` leaves them open: all
    blocks are recomputed if memory cannot be estimated. Takes some seconds. Collective.

    Raises UserError for a model without blocks, and for mistakes in the configuration, on all ranks.
    """
    from trainapp.parallel.ranks import answered_by_rank_zero

    settings = config.activation_checkpointing
    if settings.mode != "auto" or settings.modes is not None:
        return config
    modes = answered_by_rank_zero(ranks, lambda: _modes(config, ranks.world_size))
    changes = {"mode": "full"} if modes is None else {"modes": modes}
    return replace(config, activation_checkpointing=replace(settings, **changes))


def _modes(config: Config, world_size: int) -> list[str] | None:
    """Choose modes for this process's device, which the planner's process need not see."""
    from trainapp.assembly.resolved_targets import choose_device
    from trainapp.planning.absent_gpu import named

    device = choose_device(config.train.device)
    config = replace(config, plan=schema.PlanSettings(techniques=False, world=world_size))
    facts = ask(named(config, device) if device.type == "cuda" else config, only_modes=True)
    if facts["method"] is None:
        reasons = "; ".join(facts["notes"])
        log.warning("activation_checkpointing=auto: no estimate (%s); all blocks are recomputed, as with full", reasons)
        return None
    modes: list[str] = facts["modes"]
    log.info("activation checkpointing: %s, as planned (%s)", modes_text(modes), facts["method"])
    return modes


def modes_text(modes: Sequence[str]) -> str:
    """The number of blocks per mode: `2 full, 4 none`."""
    return ", ".join(f"{count} {mode}" for mode, count in Counter(modes).items())


def call_in_subprocess(function: str, *arguments: Any, patience: float | None = None, sees_devices: bool = True) -> Any:
    """The result of the function with this dotted name, called in a separate process. Importing torch there takes
    seconds.

    arguments: pickled, as is the answer. patience: seconds; None waits. sees_devices: False hides CUDA, whose context
    would take some hundred MiB of a device that may be full. Raises NoAnswer, and the function's UserError.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # users' modules, too
    if not sees_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # Files rather than pipes, whose end comes only after every process that the function has left behind.
    with TemporaryFile() as request, TemporaryFile() as answer, TemporaryFile() as errors:
        pickle.dump((function, arguments), request)
        request.seek(0)
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        try:
            done = subprocess.run(
                command, env=environment, stdin=request, stdout=answer, stderr=errors, timeout=patience, check=False
            )
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the planner's process took longer than {patience:.0f} s") from None
        except OSError as problem:  # out of memory, or of processes
            raise NoAnswer(f"the planner's process cannot start: {problem}") from None
        answer.seek(0)
        errors.seek(0)
        code, content = done.returncode, answer.read()
        if code or not content:
            last_line = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise NoAnswer(f"the planner's process ended with {ending}: {last_line}".removesuffix(": "))
    outcome = pickle.loads(content)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def main() -> None:
    """Run in the process that `call_in_subprocess` starts: answer the request on stdin, on stdout, with the function's
    result, its UserError, or NoAnswer for any other error.
    """
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output of users' modules and data sets
    function, arguments = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level=logging.ERROR)  # the run itself will warn
    called = pkgutil.resolve_name(function)
    gc.freeze()  # walking all of torch in every collection took a tenth of a large plan's time
    try:
        outcome = called(*arguments)
    except (UserError, NoAnswer) as error:
        outcome = error
    except Exception as error:
        log.debug("%s: no answer", function, exc_info=True)
        outcome = NoAnswer(summary_of(error))
    pickle.dump(outcome, answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # torch's own end may abort after a trace
