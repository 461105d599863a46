"""What steps that are run for real say of a trace: of models that others wrote, and of those that read values."""

from typing import NamedTuple

from trainapp.planning import small_step
from trainapp.planning.sizes import Facts, Planner
from trainapp.planning.traced_run import ON_CPU
from trainapp.units import bytes_text

_NOT_COMPARED = (
    "no real step was compared with the trace, since none is small enough: a number that decides a length, or how "
    "often something is done, may be another one in a run"
)


class Doubt(NamedTuple):
    """reason: why the trace is wrong. note: what else is to be said of it. least: bytes of a real step with the planned
    size where they are less than any way that was traced; 0 if they are not. meets_trace: whether the model finds
    tensors of the trace, so that no step can be run for real in this process.
    """

    reason: str = ""
    note: str = ""
    least: int = 0
    meets_trace: bool = False


def of_reads(planner: Planner, facts: Facts) -> Doubt | None:
    """What a step that is run for real says where the model reads values, or shapes depend on them: one of the planned
    size, if that is small. None where it says nothing else.
    """
    planned = facts.get("micro_size", facts.get("largest_micro_size"))
    if planner.world > 1 or planner.place is not ON_CPU or planned is None:
        return None
    traced = planner.at(max(1, planned), 0)
    if not traced.reads and not traced.assumed:
        return None
    smallest = min(max(small_step.SIZE, planner.smallest), planner.workload.share)
    for size in sorted({max(planned, smallest), smallest}, reverse=True):
        try:
            found = small_step.beyond_ways(planner.config, planner.components, size)
        except small_step.StepFailed as error:
            return Doubt(note=str(error))
        if found is None:
            continue
        if found.reason:
            return Doubt(found.reason, meets_trace=found.meets_trace)
        low = facts.get("range_bytes", [0])[0]
        if size != planned or found.real >= low or not traced.reads:
            return None
        return Doubt(note=f"a step of {size} samples, run for real, needs {bytes_text(found.real)}", least=found.real)
    return Doubt(note=_NOT_COMPARED) if traced.reads else None


def of_foreign_code(planner: Planner, facts: Facts) -> Doubt | None:
    """What a small step that is run for real says of the trace of a model that others wrote. None where that is
    nothing.
    """
    config = planner.config
    traced, (low, high) = planner.at(facts["micro_size"], 0), facts.get("range_bytes", (0, 0))
    packages = {*traced.packages, *(name.partition(".")[0] for name in config.user_packages)}
    # Of several ways, a small step takes one. It goes through training and evaluation in turn, as its trace does.
    has_ways = traced.reads or traced.assumed or traced.varies or (low != high and not traced.leaves)
    if not packages or planner.place is not ON_CPU or has_ways:
        return None
    if planner.world == 1:
        size = min(max(small_step.SIZE, planner.smallest), planner.workload.share)
        try:
            found = small_step.difference(config, planner.components, size)
        except small_step.StepFailed as error:
            return Doubt(note=str(error))
        if found is not None:
            return Doubt(found.reason) if found.reason else None
    unknown = "the model may behave differently when it is traced, and no small step could be run to compare"
    return Doubt(note=unknown) if small_step.look_for_fakes(packages) else None
