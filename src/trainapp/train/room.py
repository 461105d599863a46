"""How much memory is left to a micro-batch, if any: what `activation_checkpointing.bytes=auto` may use."""

import shlex

from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.device import DeviceMemory, size_of, static_bytes
from trainapp.memory.kinds import MemoryKind
from trainapp.parallel.ranks import Ranks
from trainapp.techniques import catalogue
from trainapp.techniques.lever import Lever, Situation, overrides_of
from trainapp.tracking.meter import Meter
from trainapp.units import bytes_text


def room_of(config: Config, memory: DeviceMemory, meter: Meter, ranks: Ranks, alone: bool) -> int:
    """The bytes that the limit leaves to a micro-batch, after what persists from step to step.

    alone: whether it is the only one of its step, which no gradients precede: on one rank, they count as its own.
    Several ranks: also after DDP's new buckets, or a whole model that FSDP has gathered. It gathers less at a time.
    CUDA, whose limit bounds reserved memory: a tenth of it is left to cache and fragmentation.
    """
    room = memory.enforced - meter.static_bytes
    if ranks.world == 1:  # ranks may keep different things, but must choose alike
        step = max(1, memory.enforced // 64)  # coarse: every other amount is another choice
        hooks = size_of(tensor for tensor in meter.hook_tensors() if tensor.device.type == memory.device.type)
        room -= -(-(memory.kept_before + hooks) // step) * step
        if alone:
            room += meter.static[MemoryKind.GRADIENTS]
    if memory.device.type == "cuda":
        room -= memory.enforced // 10
    if ranks.world > 1:
        gradients = sum(p.numel() * p.element_size() for p in meter.parameters)  # of all shards
        room -= gradients if config.parallel.strategy == "ddp" else 2 * gradients
    return room


def require_room(memory: DeviceMemory, state: TrainState, situation: Situation) -> None:
    """Raises UserError when the limit leaves no memory for any batch, however small. It names the levers that help,
    those first that save enough to leave some.
    """
    sizes = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
    total = sum(sizes.values())
    if memory.limit is not None and total >= memory.limit:
        parts = ", ".join(f"{kind.label} {bytes_text(size)}" for kind, size in sizes.items() if size)
        excess = total - memory.limit
        levers = catalogue.of_state(situation, sizes)
        levers.sort(key=lambda saving: 1 if saving[0] is None else 0 if saving[0] > excess else 2)
        lines = [
            f"  {_pasted(lever, situation)}: saves {_saving(saved, lever, excess)}; cost: {lever.costs}"
            for saved, lever in levers
        ]
        raise UserError(
            f"memory.limit={bytes_text(memory.limit)}: {parts} need {bytes_text(total)} before any batch; raise the "
            "limit, use a smaller model, or one of these:\n" + "\n".join(lines).replace("`", "") + "\n"
            "mode=plan behind the same command traces a step with each of them, also with several, and says which fit."
        )


def _saving(saved: int | None, lever: Lever, excess: int) -> str:
    if saved is None:
        return lever.saves
    if saved <= excess:
        return f"{bytes_text(saved)}, which may not be enough"
    return f"{bytes_text(saved)}, which leaves at least {bytes_text(saved - excess)} for a batch"


def _pasted(lever: Lever, situation: Situation) -> str:
    """Its overrides; its setting where the value is the user's to choose."""
    return shlex.join(overrides_of([lever])) if lever.changes else lever.setting
