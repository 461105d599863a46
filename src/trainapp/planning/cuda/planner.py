"""The plan for a CUDA device that this machine need not have: what is allocated there, and what is reserved."""

import dataclasses
import functools
from collections.abc import Callable, Collection

from trainapp.assembly.components import Components
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.kinds import MemoryKind
from trainapp.planning.bounds import traced_ways, ways_beside
from trainapp.planning.certainty import EXACT, PREDICTED, RANGE, Noticed, certainty_of
from trainapp.planning.cuda.allocations import Allocations
from trainapp.planning.cuda.device_planner import BandPlanner, DevicePlanner, facts_of
from trainapp.planning.cuda.devices import find
from trainapp.planning.cuda.place import CudaPlace
from trainapp.planning.cuda.pretend import can_pretend, give_autograd_a_device
from trainapp.planning.cuda.speeds import GpuSpeeds, rates_of
from trainapp.planning.recorder import Peak
from trainapp.planning.sizes import Facts, Measured, Planner
from trainapp.planning.traced_run import Trace
from trainapp.techniques.lever import Lever
from trainapp.units import bytes_text

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


class CudaPlanner(DevicePlanner):
    """Traces on CUDA tensors without data and replays the allocations in a model of CUDA's allocator."""

    error_of_time = 0.3  # no run has confirmed an estimate by data sheets

    def __init__(self, config: Config, components: Components):
        super().__init__(config, components)
        self.place = self._on_device = CudaPlace(self.named)
        self._expandable = config.memory.expandable_segments
        self.band = BAND_OF_RANKS[1] - 1 if self.world > 1 else 0.0

    @property
    def room(self) -> int:
        """The bytes that what is said to fit may reserve: the limit, less the error of a plan of several ranks."""
        return int(self.limit / (1 + self.band))

    @functools.cached_property
    def speeds(self) -> GpuSpeeds:
        """By data sheets."""
        return GpuSpeeds(rates_of(self.named), self.config)

    def shows(self, lever: Lever) -> bool:
        """As `Planner.shows`, but the allocator is planned, and bf16 helps no device that emulates it."""
        of_ranks = lever.is_of_several_ranks and self.world == 1
        emulated = lever.changes.get("precision.mode") in ("bf16", "bf16_pure") and not self.named.has_bf16
        return not of_ranks and not emulated and not any(name.startswith("checkpointing.") for name in lever.changes)

    def measured(self, size: int, eval_size: int) -> Measured:
        """As `Planner.measured`: what is reserved has to fit."""
        traced = self.at(size, eval_size)
        assert traced.work is not None, "traced without counting its operations"
        allocated, reserved = self.peaks(size, eval_size)
        sizes = {"peak_bytes": allocated, "reserved_bytes": reserved}
        return Measured(reserved, sizes, traced.peak.phases, self.certainty(size, eval_size), traced.work)

    def needed_by_eval(self, eval_size: int) -> int:
        """What an evaluation reserves."""
        return self.peaks(0, eval_size)[1]

    def variant(self, config: Config) -> "CudaPlanner":
        """Of a configuration with the same model and data: see `ranking`."""
        planner = CudaPlanner(config, self.components)
        planner.counts_work, planner.smallest = self.counts_work, self.smallest
        planner.place = planner._on_device = self._on_device
        return planner

    def predicted(self, certainty: str) -> str:
        """The certainty of a figure for a device that is not here, or for several."""
        if certainty != EXACT:
            return certainty
        return RANGE if self.band else PREDICTED

    def peaks(self, size: int, eval_size: int) -> tuple[int, int]:
        """Bytes allocated and reserved with these sizes, whichever way a run goes; 0 leaves out the evaluation."""
        first = self.at(size, eval_size)
        ways = ways_beside([first], self.config.train.grad_clip, is_low_asked=False)
        others = traced_ways(lambda way: self.at(size, eval_size, way), ways)
        peaks = [self._peaks(trace.allocations) for trace in (first, *others)]
        return max(allocated for allocated, _ in peaks), max(reserved for _, reserved in peaks)

    def _peaks(self, allocations: Allocations) -> tuple[int, int]:
        """Bytes allocated and reserved: the room where the allocator keeps to it by returning cached segments, which
        takes time.
        """
        replayed = allocations.replayed(self._expandable)
        allocated = max(replayed.peak_allocated, allocations.peak_of_building)
        reserved = replayed.peak_reserved
        if reserved > self.room and allocations.fit(self._expandable, self.room):
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
            "reserved_bytes": max(self._peaks(whole)[1], self.peaks(size, eval_size)[1]),
            "expandable_segments": self._expandable,
            "device": facts_of(self),
        }
        if "range_bytes" in facts:
            facts["range_bytes"] = [size + added for size in facts["range_bytes"]]
        notes = []
        freely = whole.replayed(self._expandable).peak_reserved
        if freely > facts["reserved_bytes"]:
            notes.append(
                f"without the limit, {bytes_text(freely)} would be reserved: near it, the allocator frees and "
                "reallocates cached memory, which takes time"
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
