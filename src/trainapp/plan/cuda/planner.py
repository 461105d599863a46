"""The plan for a CUDA device that this machine need not have: what is allocated there, and what is reserved."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.kinds import MemoryKind
from trainapp.plan import residuals
from trainapp.plan.certainty import EXACT, PREDICTED, RANGE, Noticed, certainty_of
from trainapp.plan.cuda.allocations import Allocations
from trainapp.plan.cuda.devices import COMMUNICATOR, CONTEXT, communicators_of, find
from trainapp.plan.cuda.place import THREADS, CudaPlace
from trainapp.plan.cuda.pretend import can_pretend, give_autograd_a_device
from trainapp.plan.recorder import Peak
from trainapp.plan.sizes import Facts, Planner
from trainapp.plan.traced_run import Trace
from trainapp.train.components import Components
from trainapp.units import bytes_text

# What a trace on the CPU says about CUDA, where attention, autocast and norms have other kernels: for a few
# models it was between 0.45 and 2.65 times what a trace on CUDA tensors says.
BAND = (0.45, 2.65)
# Of several ranks: no run of trainapp on several GPUs has been compared with its plan yet. What others have published
# of their own programs is 18 to 22% below the plan of a like one of ours (benchmarks/plan_cuda.py --published), and 3
# to 4% above a trace of theirs (benchmarks/plan_torchtitan.py).
BAND_OF_RANKS = (0.75, 1.1)
BUILDING = "building"  # the phase before the first step
_UNCONFIRMED = (
    "no run on several GPUs has confirmed such a plan: the range is from 25% less to 10% more, and what fits "
    "has 10% to spare"
)
_CONVOLUTIONS = (
    "convolutions: what cuDNN needs for its algorithms is chosen on the device, and comes on top; plan with a smaller "
    "memory.limit to leave room for it"
)


def for_device(config: Config, load: Callable[[Config], Components]) -> Planner:
    """The planner for `plan.device`. load: opens the data and finds the classes.

    Raises UserError for an unknown device and for settings that it contradicts.
    """
    if config.train.device not in ("auto", "cuda"):
        raise UserError(
            f"plan.device={config.plan.device} with train.device={config.train.device}: the plan would be for CUDA; "
            "use train.device=auto"
        )
    if config.precision.mode in ("int8", "fp8"):
        raise UserError(
            f"plan.device={config.plan.device} with precision={config.precision.mode}: its kernels cannot be traced "
            "without the device; plan with precision=bf16, which needs as much memory but for temporaries of "
            "the products"
        )
    mapped = [name for name in ("static_graph", "find_unused_parameters") if getattr(config.parallel.ddp, name)]
    if config.parallel.strategy == "ddp" and mapped:
        raise UserError(
            f"plan.device={config.plan.device} with parallel.ddp.{mapped[0]}=true: DDP's map of used parameters takes "
            f"memory of a driver; plan without parallel.ddp.{mapped[0]}, which is a few bytes per parameter less"
        )
    find(str(config.plan.device))
    traced_from = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    if not can_pretend():
        return BandPlanner(traced_from, load(traced_from))
    give_autograd_a_device()  # before any backward, in which the engine counts the devices
    return CudaPlanner(traced_from, load(traced_from))


class _DevicePlanner(Planner):
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


class CudaPlanner(_DevicePlanner):
    """Traces on CUDA tensors without data and replays the allocations in a model of CUDA's allocator.

    room: the bytes that may be reserved by what is said to fit: the limit, less the error of a plan of several ranks.
    """

    def __init__(self, config: Config, components: Components):
        super().__init__(config, components)
        self.place = self._on_device = CudaPlace(self.named)
        self._expandable = config.memory.expandable_segments
        self.band = BAND_OF_RANKS[1] - 1 if self.world > 1 else 0.0
        self.room = int(self.limit / (1 + self.band))
        # Measured with one process, see `residuals`.
        self.residual = residuals.recall(config, self.named.reported) if self.world == 1 else 0

    def variant(self, config: Config) -> "CudaPlanner":
        """Of a configuration with the same model and data: see `levers`."""
        planner = CudaPlanner(config, self.components)
        planner.smallest = self.smallest
        planner.place = planner._on_device = self._on_device
        return planner

    def predicted(self, certainty: str) -> str:
        """The certainty of a figure for a device that is not here, or for several."""
        if certainty != EXACT:
            return certainty
        return RANGE if self.band else PREDICTED

    def peaks(self, size: int, eval_size: int) -> tuple[int, int]:
        """Bytes allocated and reserved with these sizes; 0 leaves out the evaluation."""
        return self._peaks(self.at(size, eval_size).allocations)

    def _peaks(self, allocations: Allocations) -> tuple[int, int]:
        """Bytes allocated and reserved: the room where the allocator keeps to it by returning cached segments, which
        takes time.
        """
        replayed = allocations.replayed(self._expandable)
        allocated = max(replayed.peak_allocated, allocations.peak_of_building)
        reserved = replayed.peak_reserved + self.residual
        if reserved > self.room and allocations.fit(self._expandable, self.room - self.residual):
            reserved = self.room
        return allocated, reserved

    def certainty(self, size: int, eval_size: int) -> str:
        """Of these peaks."""
        return self.predicted(certainty_of(Noticed.by([self.at(size, eval_size)]), 0, 0).name)

    def needed(self, trace: Trace) -> int:
        """Bytes at the higher end, at most the limit if the allocator serves everything: what is allocated then, else
        what would be reserved without a limit. Up to the limit it reserves as much as it may, which would not tell the
        search how far off a size is.
        """
        allocated, reserved = (int(size * (1 + self.band)) for size in self._peaks(trace.allocations))
        return allocated if reserved <= self.limit else reserved

    def search(self, only: Collection[str]) -> tuple[Facts, Peak | None]:
        """As `Planner.search`, with peaks in bytes reserved."""
        facts, peak = super().search(only)
        if "largest_eval_micro_size" in facts:
            facts["largest_eval_peak_bytes"] = self.peaks(0, facts["largest_eval_micro_size"] or 1)[1]
        if "largest_micro_size" in facts:
            facts["largest_peak_bytes"] = self.peaks(facts["largest_micro_size"] or self.smallest, 0)[1]
        certainties = {key: self.predicted(facts[key]) for key in ("certainty", "eval_certainty") if key in facts}
        return facts | certainties, peak

    def plan(self) -> tuple[Facts, Peak | None]:
        """As `Planner.plan`, with what the allocator makes of a step, another one and an evaluation."""
        facts, peak = super().plan()
        size, eval_size = facts["micro_size"], facts["eval_micro_size"] or 0
        by_rank = {rank: self.at_rank(int(rank), size, eval_size).allocations for rank in facts["ranks"]["peak_bytes"]}
        whole: Allocations = by_rank[str(facts["ranks"]["binding_rank"])]
        libraries, live = whole.workspaces, facts["peak_bytes"]
        stepping = max(whole.replayed(self._expandable).peak_allocated, live + libraries)
        added = stepping - live
        facts |= {
            "peak_bytes": stepping,
            "certainty": self.predicted(facts["certainty"]),
            "kinds": facts["kinds"] | {"libraries": libraries, "rounding": added - libraries},
            "phases": {name: size + added for name, size in facts["phases"].items()},
            "allocated_bytes": stepping,
            "reserved_bytes": self._peaks(whole)[1],
            "expandable_segments": self._expandable,
            "residual_bytes": self.residual,
            "device": _facts_of(self),
        }
        if "range_bytes" in facts:
            facts["range_bytes"] = [size + added for size in facts["range_bytes"]]
        notes = []
        if self.residual:
            notes.append(
                f"{bytes_text(self.residual)} of what is reserved: a run on this device took so much more than planned"
            )
        if self._on_device.convolutions:
            notes.append(_CONVOLUTIONS)
        if self.world > 1:
            notes += self._of_ranks(facts, by_rank, whole)
        if notes:
            facts["notes"] = [*facts.get("notes", []), *notes]
        return facts, peak

    def _of_ranks(self, facts: Facts, by_rank: dict[str, Allocations], whole: Allocations) -> list[str]:
        """Completes the facts of several ranks. Returns notes."""
        notes = [_UNCONFIRMED]
        peaks = {rank: self._peaks(allocations) for rank, allocations in by_rank.items()}
        facts["ranks"] |= {
            "peak_bytes": {rank: allocated for rank, (allocated, _) in peaks.items()},
            "reserved_bytes": {rank: reserved for rank, (_, reserved) in peaks.items()},
        }
        facts["reserved_bytes"] = max(reserved for _, reserved in peaks.values())
        building = whole.peak_of_building
        if building > facts["allocated_bytes"]:
            notes.append(
                f"each rank has the whole model on its device, {bytes_text(building)}, before it is sharded; "
                "parallel.fsdp.meta_init=true builds the shards alone"
            )
            facts |= {
                "peak_bytes": building,
                "allocated_bytes": building,
                "phases": {BUILDING: building} | facts["phases"],
                "binding_phase": BUILDING,
                "binding_module": "",
                "kinds": {MemoryKind.PARAMETERS.value: building},
            }
        low, high = facts.get("range_bytes", [facts["allocated_bytes"]] * 2)
        ends = [int(low * BAND_OF_RANKS[0]), int(max(high, facts["allocated_bytes"]) * (1 + self.band))]
        facts |= {"range_bytes": ends}
        return notes


class BandPlanner(_DevicePlanner):
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
            "device": _facts_of(self),
        }
        return facts, peak


def _facts_of(planner: _DevicePlanner) -> dict[str, Any]:
    device, communicators = planner.named, communicators_of(planner.config.parallel) if planner.world > 1 else 0
    return {
        "name": device.name,
        "memory_bytes": device.memory,
        "context_bytes": CONTEXT,
        "nccl_bytes": communicators * COMMUNICATOR,
    }
