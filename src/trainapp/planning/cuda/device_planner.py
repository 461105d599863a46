"""Plans for a CUDA device that this machine need not have; where CUDA cannot be traced, a band around the CPU's."""

from collections.abc import Collection
from typing import Any

from trainapp.assembly.components import Components
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.planning.certainty import RANGE
from trainapp.planning.cuda.devices import COMMUNICATOR, CONTEXT, communicators_of, find
from trainapp.planning.cuda.place import THREADS, CudaPlace
from trainapp.planning.recorder import Peak
from trainapp.planning.sizes import Facts, Planner
from trainapp.units import bytes_text

# What a trace on the CPU says about CUDA, where attention, autocast and norms have other kernels: for a few
# models it was between 0.45 and 2.65 times what a trace on CUDA tensors says.
BAND = (0.45, 2.65)


class DevicePlanner(Planner):
    """Plans within what a run on the device may reserve."""

    def __init__(self, config: Config, components: Components):
        super().__init__(config, components)
        assert config.plan.device is not None, "see for_device"
        self.named = find(config.plan.device)
        self.limit = CudaPlace(self.named).limit(config)
        if self.limit > self.named.memory:
            raise UserError(
                f"memory.limit={config.memory.limit}: plan.device={self.named.name} has "
                f"{bytes_text(self.named.memory)}; use less, or a fraction"
            )


class BandPlanner(DevicePlanner):
    """Where CUDA tensors cannot be pretended: a band around what a trace on the CPU says."""

    def search(self, only: Collection[str]) -> tuple[Facts, Peak | None]:
        """No size can be promised."""
        return self.plan()

    def plan(self) -> tuple[Facts, Peak | None]:
        """As `Planner.plan`, without sizes that fit."""
        facts, peak = super().plan()
        low, high = facts.get("range_bytes", [facts["peak_bytes"]] * 2)
        libraries = THREADS * self.named.cublas_workspace
        ends = [round(low / BAND[1]) + libraries, round(high / BAND[0]) + libraries]
        facts |= {
            "peak_bytes": ends[1],
            "certainty": RANGE,
            "range_bytes": ends,
            "notes": [
                *facts.get("notes", []),
                "only traced on the CPU, whose kernels differ, and so are phases and kinds; for figures of CUDA, plan "
                "on Linux (x86-64 or aarch64)",
            ],
            "largest_micro_size": None,
            "largest_eval_micro_size": None,
            "device": facts_of(self),
        }
        return facts, peak


def facts_of(planner: DevicePlanner) -> dict[str, Any]:
    """The device, for plan.json."""
    device, communicators = planner.named, communicators_of(planner.config.parallel) if planner.world > 1 else 0
    return {
        "name": device.name,
        "memory_bytes": device.memory,
        "context_bytes": CONTEXT,
        "nccl_bytes": communicators * COMMUNICATOR,
        "room_bytes": planner.room,
    }
