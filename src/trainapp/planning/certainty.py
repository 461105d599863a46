"""How sure a figure of the plan is, and why it is no surer: decided here, for plans, searches and levers alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainapp.planning.traced_run import Trace
from trainapp.units import listed

EXACT, PREDICTED, PROBED = "exact", "predicted", "probed"
RANGE, NOT_TRACEABLE = "range", "not traceable"
SURE = (EXACT, PROBED)  # a step that needs less contradicts these, too
# How far off a peak may be, as a share of it: a range by its ends, an estimate as much as it leaves free.
SLACK = {EXACT: 0.0, PREDICTED: 0.05, PROBED: 0.03, RANGE: 0.0, NOT_TRACEABLE: 0.05}


@dataclass(frozen=True)
class Noticed:
    """What traces have noticed that a run may do otherwise; the fields are those of `Trace`.

    untraced: why a way that the run may go could not be traced.
    """

    reads: frozenset[str] = frozenset()
    assumed: frozenset[str] = frozenset()
    probed: frozenset[str] = frozenset()
    unsettled: frozenset[str] = frozenset()
    varies: bool = False
    untraced: tuple[str, ...] = ()

    @classmethod
    def by(cls, traces: Iterable[Trace], untraced: Iterable[str] = ()) -> "Noticed":
        """What these traces have noticed."""
        traces = list(traces)
        unsettled = {reason for trace in traces for reason in trace.unsettled}
        if any(trace.kept for trace in traces) and any(trace.training is None for trace in traces):
            unsettled.add("training and evaluation are traced separately, without what the other keeps")
        if not unsettled and (left := _changes_the_other(traces)):
            unsettled.add(
                f"training and evaluation are traced separately, and one may change the other ({listed(left)})"
            )
        return cls(
            reads=frozenset(phase for trace in traces for phase in trace.reads),
            assumed=frozenset(operator for trace in traces for operator in trace.assumed),
            probed=frozenset(operator for trace in traces for operator in trace.probed),
            unsettled=frozenset(unsettled),
            varies=any(trace.varies for trace in traces),
            untraced=tuple(untraced),
        )

    def notes(self) -> list[str]:
        """Why the run may need more or less than was traced."""
        notes = []
        if self.varies:
            notes.append(
                "the batches differ in shape, or in strings or numbers beside the tensors: the longest of the first "
                "ones counts, and a longer one needs more"
            )
        if self.reads:
            phases = ", ".join(sorted(self.reads))
            notes.append(
                f"values are read ({phases}): traced as all true and as all false; a mix may need more, and so may "
                "numbers that decide a length or how often something is done"
            )
        if self.assumed:
            notes.append(
                f"shapes depend on values ({', '.join(sorted(self.assumed))}): the range is from nothing to everything "
                "selected; of a router, from equal parts to the same choice for all"
            )
        if self.unsettled:
            notes.append(f"other steps may need more: {', '.join(sorted(self.unsettled))}")
        return [*notes, *(f"the other way cannot be traced ({reason})" for reason in dict.fromkeys(self.untraced))]


def _changes_the_other(traces: Sequence[Trace]) -> list[str]:
    """What training leaves for evaluations, or these for training. None where a trace of both in turn shows that each
    needs as much as by itself, and leaves nothing more.
    """
    left = sorted({name for trace in traces for name in trace.leaves})
    in_turn = [trace for trace in traces if trace.training is not None and trace.evaluation is not None]
    apart = [trace.peak.phases for trace in traces if trace not in in_turn]
    if in_turn and not any(trace.leaves for trace in in_turn):
        phases = in_turn[0].peak.phases
        left = [] if all(phases[name] == size for of in apart for name, size in of.items()) else left
        left = left if apart else []
    return left


@dataclass(frozen=True)
class Certainty:
    """name: one of the five above. ends: the lowest and the highest peak in bytes, of a range. notes: for people."""

    name: str
    ends: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """For plan.json."""
        ends = {} if self.ends is None else {"range_bytes": list(self.ends)}
        return {"certainty": self.name} | ends | ({"notes": list(self.notes)} if self.notes else {})


def certainty_of(noticed: Noticed, low: int, high: int) -> Certainty:
    """Of a peak that lies between two traced ones. Whatever was noticed makes it a range, even where both ends are
    equal: of the ways that a run may go, only a few are traced.
    """
    notes = noticed.notes()
    name, ends = EXACT, None
    if notes or low != high:
        name, ends = RANGE, (low, high)
    elif noticed.probed:
        name = PROBED
    if noticed.probed:
        notes.append(f"run for real to know what they allocate: {', '.join(sorted(noticed.probed))}")
    return Certainty(name, ends, tuple(notes))
