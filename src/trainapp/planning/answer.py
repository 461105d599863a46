"""The keys of plan.json: always all of them, whatever the outcome. docs/memory.md says what they mean. Imports no
torch.
"""

import copy
from typing import Any

# In the order of the file. A list is empty where there is nothing to list; everything else is None where it does not
# apply or is not known.
_KEYS: dict[str, Any] = {
    "certainty": None,
    "reason": None,
    "notes": [],
    "peak_bytes": None,
    "range_bytes": None,
    "binding_phase": None,
    "binding_module": None,
    "phases": None,
    "kinds": None,
    "static": None,
    "ranks": None,
    "micro_size": None,
    "eval_micro_size": None,
    "limit_bytes": None,
    "largest_micro_size": None,
    "largest_eval_micro_size": None,
    "most_micro_size": None,
    "most_eval_micro_size": None,
    "levers": [],
    "levers_eval_micro_size": None,
    "best": None,
    "estimate": None,
    "device": None,
    "allocated_bytes": None,
    "reserved_bytes": None,
    "expandable_segments": None,
    "traces": None,
    "seconds": None,
}
_OF_LEVERS = {"reserved_bytes": None}  # of `plan.device`; the other keys of a lever are always there
_OF_SEARCHES = ("largest_micro_size",)  # of a lever; the best plan has `micro_size`, which is the same


def complete(facts: dict[str, Any]) -> dict[str, Any]:
    """What the planner has found, with every key of plan.json."""
    unknown = facts.keys() - _KEYS.keys()
    assert not unknown, f"not in the documentation of plan.json: {sorted(unknown)}"
    found = {name: facts.get(name, copy.copy(default)) for name, default in _KEYS.items()}
    found["levers"] = [_OF_LEVERS | entry for entry in found["levers"]]
    if found["best"] is not None:
        found["best"] = _OF_LEVERS | {name: value for name, value in found["best"].items() if name not in _OF_SEARCHES}
    return found
