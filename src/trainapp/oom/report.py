"""The report of an out-of-memory error: where it happened and what filled the memory."""

import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from trainapp.files import OOM_REPORTS, strict_json
from trainapp.memory.detection import broken_part, requested_bytes
from trainapp.memory.live_tensors import Category
from trainapp.memory.static import optimizer_tensors, size_of
from trainapp.oom.failure import RESIDENT, Failure
from trainapp.parallel.ranks import PeerOutOfMemory
from trainapp.parallel.strategy import TaskModule
from trainapp.sizes.failures import ErrorKind
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training.memory_watch import SwallowedOutOfMemory
from trainapp.training.phase import Phase
from trainapp.training.session import Session

# Keys in files that differ from the fields' names; and fields that are not in files.
FILE_KEYS = {"is_local": "alone", "failed_ranks": "culprits"}
NOT_IN_FILES = ("events", "categories", "recovery", "kind", "others_are_informed", "fewest_samples", "technique")


def sizes_of_phase(session: Session, phase: Phase) -> MicroBatchSizes:
    """Return the micro-batch sizes that a phase uses: evaluation has its own."""
    return session.sizes.evaluation if phase is Phase.EVALUATE else session.sizes.train


def step_of_error(session: Session) -> int:
    """Return the number of the step in which an error was raised: the coming one if it has begun, otherwise the last,
    which is evaluated or saved.
    """
    phase = session.engine.reported_phase
    step = session.state.progress.step
    if phase.can_be_undone or phase.is_partly_applied or phase.begins_step:
        step += 1
    return step


def describe(session: Session, error: BaseException, kind: ErrorKind = ErrorKind.OUT_OF_MEMORY) -> Failure:
    """Describe an error. Call while it is handled: it reads state that is gone afterwards. Needs no device memory.

    Args:
        session: in whose work it was raised.
        error: the error.
        kind: of the error.
    """
    memory = session.memory

    # Where it happened.
    phase, module = _locate(session, error)
    is_within_update = phase.can_be_undone or phase.is_partly_applied
    micro_batch = sizes_of_phase(session, phase).current
    is_evaluation_of_one_rank = phase is Phase.EVALUATE and not session.strategy.forward_is_collective

    # What memory was used for. trainapp's own errors have the numbers as attributes, torch's in their text.
    used = getattr(error, "used", None) or memory.used()
    requested = getattr(error, "requested", None) or requested_bytes(str(error))
    category = getattr(error, "category", None)
    events, categories = memory.events(session.engine.gradients())
    return Failure(
        step=step_of_error(session),
        phase=phase,
        module=module,
        message=_first_line(error),
        requested=requested,
        used=used,
        limit=memory.enforced,
        by_category=_by_category(session, used, events, categories),
        trace=traceback.format_exc(),
        rank=session.ranks.rank,
        is_local=session.ranks.world_size == 1 or is_evaluation_of_one_rank,
        by_peer=isinstance(error, PeerOutOfMemory),
        kind=kind,
        host=_is_hosts_error(session, error, kind),
        swallowed=isinstance(error, SwallowedOutOfMemory),
        update=session.state.update.name if is_within_update else "",
        resident=category if category in RESIDENT else None,
        accumulates=session.engine.accumulates,
        samples=micro_batch.samples,
        elements=micro_batch.elements,
        broken=broken_part(error),
        technique=_refused_technique(session, kind),
        events=events,
        categories=categories,
    )


def _refused_technique(session: Session, kind: ErrorKind) -> str:
    """Return the setting of the technique that the model refuses, if that is the error."""
    climb = session.recovery.climb
    if kind is not ErrorKind.TECHNIQUE_REFUSED or climb is None:
        return ""
    return climb.technique


def _is_hosts_error(session: Session, error: BaseException, kind: ErrorKind) -> bool:
    """Return whether the host ran out of memory: torch's own error is for a device or for `memory.limit`."""
    is_on_cpu = session.memory.device.type == "cpu"
    return is_on_cpu and kind is ErrorKind.OUT_OF_MEMORY and not isinstance(error, torch.OutOfMemoryError)


def _locate(session: Session, error: BaseException) -> tuple[Phase, str]:
    """Return the phase and the module's path: the innermost module among the frames that the error passed through."""
    paths = {id(module): path for path, module in session.state.model.named_modules()}
    tracked_path = session.memory.module_path.take_failing()  # always: it must not be there for the next error

    # The frames go from the outermost to the innermost.
    module_path = ""
    has_entered_model = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, TaskModule):  # in its hook, which gathers parameters before the task runs
            has_entered_model = frame.f_code.co_name != "forward"
        if isinstance(owner, nn.Module) and id(owner) in paths:
            module_path = paths[id(owner)] or module_path
            has_entered_model = True

    # What a task does outside of the model is the loss.
    phase = session.engine.reported_phase
    if phase is Phase.FORWARD and not has_entered_model:
        phase = Phase.LOSS
    if phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE) and not phase.updates_in_backward:
        return phase, module_path

    # A backward passes through no frames of modules, but while memory is watched, the running one is tracked.
    while tracked_path and tracked_path not in paths.values():  # starts with wrappers of DDP or FSDP2
        _, _, tracked_path = tracked_path.partition(".")
    path = module_path or tracked_path
    if not path and not session.memory.sees_modules:
        return phase, "compiled"
    return phase, path


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _by_category(
    session: Session, used: int, events: list[tuple[int, int]], categories: dict[int, Category]
) -> dict[Category, int]:
    """Return `used` by category; everything without another category counts as activations."""
    sizes = dict(session.meter.static)
    sizes.pop(Category.GRADIENTS, None)  # measured below: they need not exist

    # What exists between micro-batches.
    buffers = list(session.meter.communication_buffers())
    if buffers:
        sizes[Category.COMMUNICATION_BUFFERS] = size_of(buffers)
    optimizer_state = []
    for optimizer in session.state.optimizers:
        optimizer_state.extend(optimizer_tensors(optimizer))
    sizes[Category.OPTIMIZER_STATE] = size_of(optimizer_state)  # some of it may have come with this step
    buffers_and_gradients = [*buffers, *session.engine.gradients()]
    sizes[Category.GRADIENTS] = size_of(buffers_and_gradients) - size_of(buffers)  # may be views of them

    # What the watched micro-batch has allocated; what has no category are activations.
    for category in (Category.BATCH, Category.KEPT):
        sizes[category] = sum(size for number, size in events if categories.get(number) is category)
    sizes[Category.ACTIVATIONS] = max(0, used - sum(sizes.values()))

    # On a GPU, also what the allocator does not know of.
    device = session.memory.device
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sizes[Category.OUTSIDE_ALLOCATOR] = max(0, total - free - torch.cuda.memory_reserved(device))
    return sizes


def path_of(session: Session, failure: Failure) -> Path:
    """Return the report's path, `oom/NNN_step_S.json`, with the rank if there are several. Makes its folder."""
    name = f"{session.sizes.oom_restarts:03d}_step_{failure.step}"
    if session.ranks.world_size > 1:
        name += f"_rank_{failure.rank}"
    folder = session.tracker.run_dir / OOM_REPORTS
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.json"


def write(session: Session, failure: Failure) -> None:
    """Write the report to `path_of`. Raises OSError."""
    # The fields of the failure and of its recovery, some of them under other names or in other forms.
    facts = {}
    fields = asdict(failure) | asdict(failure.recovery)
    for name, value in fields.items():
        if name not in NOT_IN_FILES:
            facts[FILE_KEYS.get(name, name)] = value
    facts["phase"] = failure.location
    facts["too_few"] = failure.samples if failure.kind is ErrorKind.TOO_FEW_SAMPLES else 0
    facts["rejects_size"] = failure.kind is ErrorKind.SIZE_REJECTED
    facts["trace"] = failure.trace.splitlines()
    path_of(session, failure).write_text(strict_json(facts, indent=1) + "\n")
