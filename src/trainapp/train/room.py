"""How much memory is left to a micro-batch: what `activation_checkpointing.bytes=auto` may use."""

from trainapp.config.schema import Config
from trainapp.memory.device import DeviceMemory, size_of
from trainapp.memory.kinds import MemoryKind
from trainapp.parallel.ranks import Ranks
from trainapp.tracking.meter import Meter


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
