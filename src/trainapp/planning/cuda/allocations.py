"""What a trace allocates and frees on a device that is not here, and what the device's allocator makes of it."""

from dataclasses import dataclass, field

from torch import Tensor

from trainapp.memory.live_tensors import Events, LiveTensors
from trainapp.planning.cuda import streams
from trainapp.planning.cuda.allocator import CachingAllocator, OutOfMemory, replay


class CountedByStream(LiveTensors):
    """Counts a CUDA device's storages. `streams`: by number, the streams of those that are not on the default one."""

    def __init__(self) -> None:
        super().__init__(devices=("cuda",))
        self.streams: dict[int, int] = {}

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that exists already, unless it is counted or on another device."""
        self._count(tensor)

    def _count(self, tensor: Tensor) -> int:
        added = super()._count(tensor)
        if added and (stream := streams.current().number):
            self.streams[self._number] = stream
        return added


@dataclass
class Allocations:
    """Everything that a trace has allocated and freed on the device.

    building: until the run was built. warm_up: by its collectives. events: by its steps. workspaces: bytes of cuBLAS,
    which stay from the first product of matrices on; first in `events`. streams: see `CountedByStream`.
    """

    workspaces: int
    events: Events = field(default_factory=list)
    building: Events = field(default_factory=list)
    warm_up: Events = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)

    def replayed(self, expandable: bool, limit: int | None = None) -> CachingAllocator:
        """The allocator after them, whose `peak_allocated` is that of the steps. Raises OutOfMemory where it would have
        raised on the device.
        """
        before = [*self.building, *self.warm_up]
        allocator = replay(before, CachingAllocator(limit, expandable), self.streams)
        allocator.peak_allocated = allocator.allocated
        return replay(self.events, allocator, self.streams)

    @property
    def peak_of_building(self) -> int:
        """Bytes allocated at once until the run was built."""
        return replay(self.building, CachingAllocator(), self.streams).peak_allocated

    def fit(self, expandable: bool, limit: int) -> bool:
        """Whether the device's allocator serves them all within `limit` reserved bytes."""
        try:
            self.replayed(expandable, limit)
        except OutOfMemory:
            return False
        return True
