"""The plan for a CUDA device that this machine need not have: what is allocated there, and what is reserved."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.plan import residuals
from trainapp.plan.certainty import EXACT, PREDICTED, RANGE, Noticed, certainty_of
from trainapp.plan.cuda.devices import CONTEXT, find
from trainapp.plan.cuda.place import THREADS, Allocations, CudaPlace
from trainapp.plan.cuda.pretend import can_pretend, give_autograd_a_device
from trainapp.plan.recorder import Peak
from trainapp.plan.sizes import Facts, Planner
from trainapp.plan.traced_run import Trace
from trainapp.train.components import Components
from trainapp.units import bytes_text

# What a trace on the CPU says about CUDA, where attention, autocast and norms have other kernels: for a few
# models it was between 0.45 and 2.65 times what a trace on CUDA tensors says.
BAND = (0.45, 2.65)
_CONVOLUTIONS = "convolutions: what cuDNN needs for its algorithms is chosen on the device, and comes on top"


def for_device(config: Config, load: Callable[[Config], Components]) -> Planner:
    """The planner for `plan.device`. load: opens the data and finds the classes.

    Raises UserError for an unknown device and for settings that it contradicts.
    """
    if config.train.device not in ("auto", "cuda"):
        raise UserError(
            f"plan.device={config.plan.device} with train.device={config.train.device}: the plan would be for CUDA; "
            "use train.device=auto"
        )
    if config.parallel.strategy != "single":
        raise UserError(
            f"plan.device={config.plan.device} with parallel={config.parallel.strategy}: a plan for a GPU is for one "
            "process; plan the ranks as on the CPU (plan.device=null train.device=cpu memory.limit=76GiB), or one of "
            "ddp's ranks with parallel=single and its share of the batch as batch.global_size"
        )
    if config.precision.mode in ("int8", "fp8"):
        raise UserError(
            f"plan.device={config.plan.device} with precision={config.precision.mode}: its kernels cannot be traced "
            "without the device; plan with precision=bf16, which needs as much memory but for what products need in "
            "passing"
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
    """Traces on CUDA tensors without data and replays the allocations in a model of CUDA's allocator."""

    def __init__(self, config: Config, components: Components):
        super().__init__(config, components)
        self.place = self._on_device = CudaPlace(self.named)
        self._expandable = config.memory.expandable_segments
        self.residual = residuals.recall(config, self.named.reported)

    def variant(self, config: Config) -> "CudaPlanner":
        """Of a configuration with the same model and data: see `levers`."""
        planner = CudaPlanner(config, self.components)
        planner.smallest = self.smallest
        planner.place = planner._on_device = self._on_device
        return planner

    @staticmethod
    def predicted(certainty: str) -> str:
        """The certainty of a figure for a device that is not here."""
        return PREDICTED if certainty == EXACT else certainty

    def peaks(self, size: int, eval_size: int) -> tuple[int, int]:
        """Bytes allocated and reserved with these sizes; 0 leaves out the evaluation."""
        allocations: Allocations = self.at(size, eval_size).allocations
        return allocations.replayed(self._expandable).peak_allocated, self._reserved(allocations)

    def certainty(self, size: int, eval_size: int) -> str:
        """Of these peaks."""
        return self.predicted(certainty_of(Noticed.by([self.at(size, eval_size)]), 0, 0).name)

    def needed(self, trace: Trace) -> int:
        """Reserved bytes: at most the limit if the allocator serves everything within it, else more."""
        reserved = self._reserved(trace.allocations)
        if reserved <= self.limit:
            return reserved
        return max(trace.allocations.replayed(self._expandable).peak_allocated, self.limit + 1)

    def _reserved(self, allocations: Allocations) -> int:
        """At the peak. The limit where the allocator keeps to it by returning cached segments, which takes time."""
        free = allocations.replayed(self._expandable).peak_reserved + self.residual
        if free > self.limit and allocations.fit(self._expandable, self.limit - self.residual):
            return self.limit
        return free

    def plan(self) -> tuple[Facts, Peak | None]:
        """As `Planner.plan`, with what the allocator makes of a step, another one and an evaluation."""
        facts, peak = super().plan()
        whole = self.at(facts["micro_size"], facts["eval_micro_size"] or 0)
        replayed = whole.allocations.replayed(self._expandable)
        libraries = whole.allocations.workspaces
        live, allocated = facts["peak_bytes"], max(replayed.peak_allocated, facts["peak_bytes"] + libraries)
        added = allocated - live
        facts |= {
            "peak_bytes": allocated,
            "certainty": self.predicted(facts["certainty"]),
            "kinds": facts["kinds"] | {"libraries": libraries, "rounding": added - libraries},
            "phases": {name: size + added for name, size in facts["phases"].items()},
            "allocated_bytes": allocated,
            "reserved_bytes": self._reserved(whole.allocations),
            "expandable_segments": self._expandable,
            "residual_bytes": self.residual,
            "device": _facts_of(self),
        }
        if "range_bytes" in facts:
            facts["range_bytes"] = [size + added for size in facts["range_bytes"]]
        if self.residual:
            more = (
                f"{bytes_text(self.residual)} of what is reserved: a run on this device took so much more than planned"
            )
            facts["notes"] = [*facts.get("notes", []), more]
        if self._on_device.convolutions:
            facts["notes"] = [*facts.get("notes", []), _CONVOLUTIONS]
        return facts, peak


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
    device = planner.named
    return {"name": device.name, "memory_bytes": device.memory, "context_bytes": CONTEXT}
