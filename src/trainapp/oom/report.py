"""The report of an out-of-memory error: where it happened and what filled the memory."""

import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from trainapp.files import strict_json
from trainapp.losses import losses
from trainapp.memory.detection import broken_part, requested_bytes
from trainapp.memory.live_tensors import Category
from trainapp.memory.static import optimizer_tensors, size_of
from trainapp.parallel.ranks import PeerOutOfMemory
from trainapp.parallel.strategy import TaskModule
from trainapp.sizes.search import FailedAllocation
from trainapp.techniques.catalogue import Situation, available
from trainapp.training.memory_watch import SwallowedOutOfMemory
from trainapp.training.phase import Phase
from trainapp.training.session import Session
from trainapp.units import bytes_text, listed

# What is in memory before a micro-batch, whatever its size.
RESIDENT = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.BUFFERS,
    Category.WEIGHT_AVERAGE,
    Category.GRADIENTS,
    Category.COMMUNICATION_BUFFERS,
)

OF_UPDATE = (Phase.GRADIENTS, Phase.UNSCALE, Phase.CLIP, Phase.COMMIT)  # no micro-batch is in memory


@dataclass
class OomReport:
    """A failed attempt at a step: out of memory or, with `too_few`, an error of the model in a micro-batch of so few
    samples. Plain values only: the error and its frames would keep every tensor of the failed step alive.

    Sizes are bytes; `old_size` and `new_size` are micro-batches, `seconds_lost` is the time of the attempt and its
    recovery.
    """

    step: int
    phase: Phase
    module: str
    message: str
    requested: int | None
    used: int
    limit: int
    by_category: dict[Category, int]
    trace: str
    rank: int = 0
    old_size: int = 0
    new_size: int = 0
    action: str = ""
    seconds_lost: float = 0.0
    alone: bool = False  # the key in files of `is_local`
    by_peer: bool = False  # another rank ran out of memory, not this one
    culprits: list[int] = field(default_factory=list)  # the ranks that ran out
    lost: list[str] = field(default_factory=list)  # parameters written by a forward without having a copy
    host: bool = False  # the host ran out, not a device or `memory.limit`
    swallowed: bool = False  # the caller caught the error
    update: str = ""  # name of the step's update; empty if it has only one, and between steps
    too_few: int = 0  # samples in the micro-batch that the model cannot run
    rejects_size: bool = False  # whether the model failed with a larger micro-batch than the validated one
    resident: Category | None = None  # what exceeded the limit before any micro-batch, by itself
    accumulates: bool = False  # whether gradients of earlier micro-batches were in memory
    samples: int = 0  # in the current micro-batch
    elements: int = 0  # in the current micro-batch; 0 if unknown
    is_constant: bool = False  # whether fewer samples have asked for the same
    broken: str | None = None  # what the error has broken for the rest of this process
    events: list[tuple[int, int]] = field(default_factory=list, repr=False)
    kinds: dict[int, Category] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether no other rank waits for this one, so that none needs to be informed."""
        return self.alone

    @property
    def place(self) -> str:
        """What asked for memory: a phase, or a category that is there before any."""
        return self.resident.label if self.resident else str(self.phase)

    @property
    def failed_allocation(self) -> FailedAllocation | None:
        """What was asked for, for the search."""
        is_size_independent = self.resident is not None or not self.phase.depends_on_size
        if self.requested is None and not is_size_independent:
            return None
        place = f"{self.phase} {self.module}{' with gradients' if self.accumulates else ''}"
        return FailedAllocation(
            place,
            self.samples,
            self.elements,
            self.requested or 0,
            self.used,
            self.limit,
            is_size_independent,
            is_optimizer_update=self.phase in OF_UPDATE,
        )

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out, not a model that cannot run this number of samples."""
        return not (self.too_few or self.rejects_size)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether parameters cannot be restored in place: only a checkpoint is safe."""
        return self.phase.is_partial or bool(self.lost)

    @property
    def why_checkpoint(self) -> str:
        """The reason for `needs_checkpoint`, for a message."""
        if self.phase.updates_in_backward:
            return "optimizer.in_backward=true has updated some of the parameters"
        if not self.lost:
            return "the parameters may be half updated"
        return f"the forward has written {listed(self.lost)}, of which there was no copy (from now on there is)"

    @property
    def evaluating(self) -> bool:
        """Whether it happened in evaluation, which has its own micro-batch size."""
        return self.phase is Phase.EVALUATE


def describe(
    session: Session, error: BaseException, has_too_few: bool = False, rejects_size: bool = False
) -> OomReport:
    """Describe an error. Call while it is handled: it reads state that is gone afterwards. Needs no device memory.

    has_too_few: whether it is an error of the model, which cannot run so few samples. rejects_size: whether it is one
    that comes with a larger micro-batch than the validated one.
    """
    memory, progress = session.memory, session.state.progress
    used = getattr(error, "used", None) or memory.used()
    phase, module = _place(session, error)
    events, kinds = memory.events(session.engine.gradients())
    first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    category = getattr(error, "category", None)
    sizes = session.sizes.evaluation if phase is Phase.EVALUATE else session.sizes.train
    is_out_of_memory = not (has_too_few or rejects_size)
    return OomReport(
        step=progress.step + (phase.can_be_undone or phase.is_partial or phase is Phase.READ),
        phase=phase,
        module=module,
        message=first_line,
        requested=getattr(error, "requested", None) or requested_bytes(str(error)),
        used=used,
        limit=memory.enforced,
        by_category=_by_category(session, used, events, kinds),
        trace=traceback.format_exc(),
        rank=session.ranks.rank,
        alone=session.ranks.world_size == 1 or (phase is Phase.EVALUATE and not session.strategy.forward_is_collective),
        by_peer=isinstance(error, PeerOutOfMemory),
        host=memory.device.type == "cpu" and is_out_of_memory and not isinstance(error, torch.OutOfMemoryError),
        swallowed=isinstance(error, SwallowedOutOfMemory),
        update=session.state.update.name if phase.can_be_undone or phase.is_partial else "",
        too_few=sizes.current.samples if has_too_few else 0,
        rejects_size=rejects_size,
        resident=category if category in RESIDENT else None,
        accumulates=session.engine.accumulates,
        samples=sizes.current.samples,
        elements=sizes.current.elements,
        broken=broken_part(error),
        events=events,
        kinds=kinds,
    )


def _by_category(
    session: Session, used: int, events: list[tuple[int, int]], kinds: dict[int, Category]
) -> dict[Category, int]:
    """`used` by category; everything without another category counts as activations."""
    memory, meter = session.memory, session.meter
    sizes: dict[Category, int] = {kind: size for kind, size in meter.static.items() if kind is not Category.GRADIENTS}
    buffers = list(meter.communication_buffers())
    if buffers:
        sizes[Category.COMMUNICATION_BUFFERS] = size_of(buffers)
    optimizer_state = [tensor for optimizer in session.state.optimizers for tensor in optimizer_tensors(optimizer)]
    sizes[Category.OPTIMIZER_STATE] = size_of(optimizer_state)  # some of it may have come with this step
    sizes[Category.GRADIENTS] = size_of([*buffers, *session.engine.gradients()]) - size_of(buffers)  # may be views
    for kind in (Category.BATCH, Category.KEPT):
        sizes[kind] = sum(size for number, size in events if kinds.get(number) is kind)
    sizes[Category.ACTIVATIONS] = max(0, used - sum(sizes.values()))
    if memory.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(memory.device)
        sizes[Category.OUTSIDE_ALLOCATOR] = max(0, total - free - torch.cuda.memory_reserved(memory.device))
    return sizes


def _place(session: Session, error: BaseException) -> tuple[Phase, str]:
    """`(phase, module path)`: the innermost module among the frames that the error passed through."""
    names = {id(module): name for name, module in session.state.model.named_modules()}
    module, entered = "", False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, TaskModule):  # in its hook, which gathers parameters before the task runs
            entered = frame.f_code.co_name != "forward"
        if isinstance(owner, nn.Module) and id(owner) in names:
            module, entered = names[id(owner)] or module, True
    phase = session.engine.reported_phase
    if phase is Phase.FORWARD and not entered:
        phase = Phase.LOSS
    if phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE) and not phase.updates_in_backward:
        return phase, module
    path = session.memory.module_path.at_failure
    while path and path not in names.values():  # starts with wrappers of DDP or FSDP2
        path = path.partition(".")[2]
    return phase, module or path


def one_line(report: OomReport) -> str:
    """The report in one line, for the terminal and the trackers."""
    where = f"{report.place}{f' ({report.module})' if report.module else ''}"
    where += f" of update {report.update}" if report.update else ""
    if report.too_few:
        samples = "a single sample" if report.too_few == 1 else f"{report.too_few} samples"
        return f"the model cannot run {samples} at step {report.step} in {where} ({report.message}): {report.action}"
    if report.rejects_size:
        size = f"micro-batch {report.old_size}" if report.old_size else "this micro-batch"
        return f"the model cannot run {size} at step {report.step} in {where} ({report.message}): {report.action}"
    if report.swallowed:
        where = "a library, which caught the error and may have used another algorithm,"
    asked = f" asking for {bytes_text(report.requested)}" if report.requested else ""
    return (
        f"out of memory at step {report.step} in {where}{asked}, {bytes_text(report.used)} of "
        f"{bytes_text(report.limit)} in use{f': {report.action}' if report.action else ''}"
    )


def write(session: Session, report: OomReport) -> Path:
    """Write `oom/NNN_step_S.json`, with the rank if there are several. Returns its path."""
    rank = f"_rank_{report.rank}" if session.ranks.world_size > 1 else ""
    path = session.tracker.run_dir / "oom" / f"{session.sizes.oom_restarts:03d}_step_{report.step}{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: value for name, value in asdict(report).items() if name not in ("events", "kinds")}
    facts |= {"phase": report.place, "trace": report.trace.splitlines()}
    path.write_text(strict_json(facts, indent=1) + "\n")
    return path


def final_message(session: Session, report: OomReport) -> str:
    """The message if no micro-batch fits: where the memory went, and which settings need less."""
    kind = "evaluation micro-batch" if report.evaluating else "micro-batch"
    largest_first = sorted(report.by_category.items(), key=lambda item: -item[1])
    lines = [
        f"out of memory in {report.place} with {kind} {report.old_size}: {_why_no_smaller(session, report)}.",
        report.message,
        f"{'limit':<18}{bytes_text(report.limit):>12}",
        *(f"{part.label:<18}{bytes_text(size):>12}" for part, size in largest_first if size),
    ]
    techniques = available(Situation(session.config, session.state.model, session.engine.knows_loss))
    if techniques:
        lines.append("Settings that save memory (add mode=plan to the command to see how much):")
        for own in techniques:
            lines.append(f"  {own.setting}: saves {own.saves}; costs {own.costs}")
    saved = session.checkpointer.newest_name()
    lines.append(f"The last checkpoint is {saved}." if saved else "No checkpoint was written yet.")
    return "\n".join(lines)


def _why_no_smaller(session: Session, report: OomReport) -> str:
    setting = "batch.eval_micro_size" if report.evaluating else "batch.global_size"
    if report.resident:
        return "what is in memory before any sample exceeds the limit, so no other size can help"
    if not report.phase.depends_on_size:
        return "what it asks for does not depend on the micro-batch"
    if losses.needs_whole_batch(session.task):
        return f"its loss needs the whole batch (whole_batch=True), which is never cut; a smaller {setting} helps"
    if report.is_constant:
        return f"what it asks for does not depend on the micro-batch{_why_split_needs_more(session, report)}"
    embeds = losses.has_embeddings(session.task) and not report.evaluating
    hint = f"; its loss keeps a whole batch, a smaller {setting} helps" if embeds else ""
    sizes = session.sizes.evaluation if report.evaluating else session.sizes.train
    if sizes.search(sizes.current.bucket).smallest > 1:
        return f"the model cannot run fewer samples{session.attempt.too_few}{hint}"
    return f"nothing is left to halve{hint}"


def _why_split_needs_more(session: Session, report: OomReport) -> str:
    """Why a step that is split needs more memory than one that is not, if that is what failed."""
    if not report.accumulates:
        return ""
    gradients = bytes_text(report.by_category.get(Category.GRADIENTS, 0))
    return (
        f". A step of several micro-batches keeps the gradients of the earlier ones ({gradients}) beside those that "
        "the backward is computing, which a step of one micro-batch does not: a smaller batch.global_size may not need "
        "to be split"
    )
