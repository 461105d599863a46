"""The record of an out-of-memory error: what is known of it, in words, numbers and a picture."""

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from trainapp import strict_json
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import Events, Kinds
from trainapp.oom.errors import broken_part, requested_bytes
from trainapp.parallel.dtensor import local
from trainapp.parallel.ranks import PeerOutOfMemory
from trainapp.parallel.strategy import TaskModule
from trainapp.torch_private import storage_id
from trainapp.train.allocations import SwallowedOutOfMemory
from trainapp.train.phase import Phase
from trainapp.train.run import Run
from trainapp.units import bytes_text, listed


@dataclass
class Incident:
    """Plain values only: the error and its frames would keep every tensor of the failed step alive.

    Sizes are bytes; `old_size` and `new_size` are micro-batches, `seconds_lost` the time of the attempt and of what
    it took to recover.
    """

    step: int
    phase: Phase
    module: str
    message: str
    requested: int | None
    used: int
    limit: int
    parts: dict[MemoryKind, int]
    trace: str
    rank: int = 0
    bucket: int = 0
    old_size: int = 0
    new_size: int = 0
    action: str = ""
    seconds_lost: float = 0.0
    unused_cache: int = 0
    by_allocator: bool = True  # torch's allocator refused it, not a library or the driver
    alone: bool = False  # no other rank waits for this one, so none needs to be informed
    by_peer: bool = False  # another rank ran out of memory, not this one
    culprits: list[tuple[int, str]] = field(default_factory=list)  # (rank, message) of the ranks that ran out
    lost: list[str] = field(default_factory=list)  # parameters that a forward has written, and that had no copy
    host: bool = False  # the host ran out, not a device or `memory.limit`
    swallowed: bool = False  # no error: what asked for the memory caught it
    update: str = ""  # in which of a step's updates; empty where there is one, and between steps
    broken: str | None = None  # what the error has broken for the rest of this process
    events: list[tuple[int, int]] = field(default_factory=list, repr=False)
    kinds: dict[int, MemoryKind] = field(default_factory=dict, repr=False)

    @property
    def is_torn(self) -> bool:
        """Whether parameters cannot be restored in place: only a checkpoint is safe."""
        return self.phase.is_torn or bool(self.lost)

    @property
    def why_torn(self) -> str:
        """The reason for `is_torn`, for a message."""
        if self.phase.updates_in_backward:
            return "optimizer.in_backward=true has updated some of the parameters"
        if not self.lost:
            return "the parameters may be half updated"
        return f"the forward has written {listed(self.lost)}, of which there was no copy (from now on there is)"

    @property
    def evaluating(self) -> bool:
        """Whether it happened in evaluation, which has its own micro-batch size."""
        return self.phase is Phase.EVALUATE


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return {storage_id(storage): storage.nbytes() for storage in storages}


def describe(run: Run, error: BaseException) -> Incident:
    """Call while the error is handled: reads state that is gone afterwards. Allocates nothing on the device."""
    memory, meter, state = run.memory, run.meter, run.state
    used = getattr(error, "used", None) or memory.used()
    phase, module = _place(run, error)
    parts: dict[MemoryKind, int] = {
        kind: size for kind, size in meter.static.items() if kind is not MemoryKind.GRADIENTS
    }
    buffers, gradients = _storages(meter.communication_buffers()), _storages(meter.gradients())
    parts[MemoryKind.GRADIENTS] = sum(size for key, size in gradients.items() if key not in buffers)
    if buffers:  # gradients may be views of them
        parts[MemoryKind.COMMUNICATION_BUFFERS] = sum(buffers.values())
    events, kinds = memory.events(meter.gradients())
    parts[MemoryKind.BATCH] = _live(MemoryKind.BATCH, events, kinds)
    if kept := _live(MemoryKind.KEPT, events, kinds):
        parts[MemoryKind.KEPT] = kept
    parts[MemoryKind.ACTIVATIONS] = max(0, used - sum(parts.values()))
    if memory.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(memory.device)
        parts[MemoryKind.OUTSIDE_ALLOCATOR] = max(0, total - free - torch.cuda.memory_reserved(memory.device))
    return Incident(
        step=state.progress.step + (phase.can_be_undone or phase.is_torn or phase is Phase.READ),
        phase=phase,
        module=module,
        message=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        requested=getattr(error, "requested", None) or requested_bytes(str(error)),
        used=used,
        limit=memory.enforced,
        parts=parts,
        trace=traceback.format_exc(),
        unused_cache=memory.unused_cache(),
        by_allocator=isinstance(error, torch.OutOfMemoryError) or requested_bytes(str(error)) is not None,
        rank=run.ranks.rank,
        alone=run.ranks.world == 1 or (phase is Phase.EVALUATE and not run.strategy.forward_is_collective),
        by_peer=isinstance(error, PeerOutOfMemory),
        host=not isinstance(error, torch.OutOfMemoryError) and memory.device.type == "cpu",
        swallowed=isinstance(error, SwallowedOutOfMemory),
        update=state.update.name if phase.can_be_undone or phase.is_torn else "",
        broken=broken_part(error),
        bucket=(run.sizes.evaluation if phase is Phase.EVALUATE else run.sizes.train).current_bucket or 0,
        events=events,
        kinds=kinds,
    )


def _live(kind: MemoryKind, events: Events, kinds: Kinds) -> int:
    """Bytes of a kind after the last event."""
    return sum(size for number, size in events if kinds.get(number) is kind)


def _place(run: Run, error: BaseException) -> tuple[Phase, str]:
    """`(phase, module path)`: the innermost module among the frames that the error passed through."""
    names = {id(module): name for name, module in run.state.model.named_modules()}
    module, entered = "", False
    for frame in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, TaskModule):  # in a hook on it, which gathers parameters, until its forward runs the task
            entered = frame.f_code.co_name != "forward"
        if isinstance(owner, nn.Module) and id(owner) in names:
            module, entered = names[id(owner)] or module, True
    phase = run.attempt.phase
    if phase is Phase.FORWARD and not entered:
        phase = Phase.LOSS
    if phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE) and not phase.updates_in_backward:
        return phase, module
    path = run.memory.module_path.at_failure
    while path and path not in names.values():  # begins with what DDP or FSDP2 has put around the model
        path = path.partition(".")[2]
    return phase, module or path


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def one_line(incident: Incident) -> str:
    """The incident in one line, for the terminal."""
    where = f"{incident.phase}{f' ({incident.module})' if incident.module else ''}"
    where += f" of update {incident.update}" if incident.update else ""
    if incident.swallowed:
        where = "a library, which caught the error and may have taken another algorithm,"
    asked = f" asking for {bytes_text(incident.requested)}" if incident.requested else ""
    return (
        f"out of memory at step {incident.step} in {where}{asked}, {bytes_text(incident.used)} of "
        f"{bytes_text(incident.limit)} in use{f': {incident.action}' if incident.action else ''}"
    )


def report(incident: Incident) -> str:
    """The whole record, as Markdown."""
    parts = sorted(incident.parts.items(), key=lambda item: -item[1])
    asked = bytes_text(incident.requested) if incident.requested else "unknown"
    rows = [
        f"# Out of memory at step {incident.step}",
        "",
        f"{one_line(incident)}.",
        "",
        "| what | value |",
        "|---|---|",
        f"| phase | {incident.phase} |",
        f"| module | {incident.module or 'not inside a module'} |",
        f"| rank | {incident.rank} |",
        f"| requested | {asked} |",
        f"| used | {bytes_text(incident.used)} |",
        f"| limit | {bytes_text(incident.limit)} |",
        *(f"| {kind.label} | {bytes_text(size)} |" for kind, size in parts),
        f"| micro-batch | {incident.old_size} -> {incident.new_size} |",
        f"| time lost | {incident.seconds_lost:.3f} s |",
        "",
        "```",
        incident.trace.rstrip(),
        "```",
        "",
    ]
    return "\n".join(rows)


def write(incident: Incident, folder: Path, number: int, world: int = 1) -> Path:
    """Write `folder/NNN_step_S.md` and `.json`, with the rank if there are several. Returns the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"_rank_{incident.rank}" if world > 1 else ""
    path = folder / f"{number:03d}_step_{incident.step}{rank}.md"
    path.write_text(report(incident))
    facts: dict[str, Any] = {k: v for k, v in asdict(incident).items() if k not in ("events", "kinds")}
    path.with_suffix(".json").write_text(strict_json.dumps(facts, indent=1) + "\n")
    return path
