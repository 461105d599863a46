"""`train.check_exactness`: runs each of the first three steps twice from the same restore point, and compares.

It finds what a retry would change in silence: a counter, a queue or a cache in plain attributes, which no rollback
restores.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainapp.checkpoint.plain import digest, encoded
from trainapp.checkpoint.stateful import DEPTH, children, moves_at_commit
from trainapp.checksum import checksum
from trainapp.errors import TrainingStopped, UserError
from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.parallel.dtensor import local
from trainapp.rng import rng_state
from trainapp.train.run import Run, Step
from trainapp.train.totals import Totals

STEPS = 3
MOST_ITEMS = 1000  # of a container, from its end: a queue grows there
MOST_FINDINGS = 5
PROTOCOL = (
    "Keep it in a buffer, or hand it over: a module by get_extra_state and set_extra_state, a task or a data set by "
    "state_dict and load_state_dict (docs/oom.md)"
)


class Contents(NamedTuple):
    """A tensor or an array, with all that a difference may be in."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    sums: str

    def __str__(self) -> str:
        checksum = hashlib.sha256(self.sums.encode()).hexdigest()[:8]
        return f"{self.kind} {list(self.shape)} of {self.dtype.removeprefix('torch.')} (checksum {checksum})"


Snapshot = dict[str, Any]  # comparable values by path


class Outcome(NamedTuple):
    """What an attempt at a step leaves."""

    attributes: Snapshot
    results: Snapshot  # totals, gradients, parameters, buffers, generators, states


def rehearse(run: Run, step: Step, accumulate: Callable[[Run, Step], Totals], undo: Callable[[], None]) -> None:
    """Accumulate the step's gradients twice, undo both, and compare. Collective. Raises TrainingStopped for a
    difference.
    """
    before = attributes(run)
    first = _outcome(run, accumulate(run, step))
    undo()
    undone = attributes(run)
    second = _outcome(run, accumulate(run, step))
    undo()
    verdict = _verdict(run, step, first, second, left=differences(before, undone))
    by_rank = [text for text in run.ranks.all_gather_object(verdict) if text]
    if by_rank:
        raise TrainingStopped(by_rank[0])


def _verdict(run: Run, step: Step, first: Outcome, second: Outcome, left: dict[str, tuple[Any, Any]]) -> str | None:
    """The message, or None where both are equal. left: attributes that the undoing left changed."""
    found = differences(first.attributes, second.attributes)
    if found:
        after = (f"{a} after the first run of step {step.number}, {b} after the second" for a, b in found.values())
        return _message(map("{}: {}".format, found, after), f"A retry does not restore it. {PROTOCOL}")
    found = differences(first.results, second.results)
    if not found:
        return None
    lines = [f"{name}: differs between two runs of step {step.number} from the same state" for name in found]
    if left:
        causes = [f"{name}: {a} before step {step.number}, {b} after it was undone" for name, (a, b) in left.items()]
        return _message(causes + lines, f"The second run began with other attributes. {PROTOCOL}")
    if not run.config.train.deterministic:
        device = run.state.device.type
        advice = (
            f"Nothing in the attributes of the model, the task and the data differs: the kernels ({device}) may add in "
            "any order; train.deterministic=true excludes that"
        )
    else:
        advice = (
            "Kernels are deterministic (train.deterministic=true) and nothing in the attributes of the model, the task "
            f"and the data differs: the state is elsewhere, such as in a global variable or a file. {PROTOCOL}"
        )
    return _message(lines, advice)


def _message(lines: Iterable[str], advice: str) -> str:
    lines = list(lines)
    more = [f"and {len(lines) - MOST_FINDINGS} more"] if len(lines) > MOST_FINDINGS else []
    title = "train.check_exactness=true: a retried step would not be the same"
    return "\n".join([title, *(f"  {line}" for line in [*lines[:MOST_FINDINGS], *more]), advice])


def _outcome(run: Run, totals: Totals) -> Outcome:
    model, stateful = run.state.model, run.state.stateful
    results = {"loss": _leaf(totals.loss), "count": _leaf(totals.count)}
    results |= {f"metric {name}": _leaf(value) for name, value in totals.metrics.items()}
    results |= {f"the gradient of model.{name}": _leaf(p.grad) for name, p in model.named_parameters()}
    for root, module in {"model": model, **stateful.modules}.items():
        tensors = (*module.named_parameters(), *module.named_buffers())
        results |= {f"{root}.{name}": _leaf(tensor) for name, tensor in tensors}
    results |= {name: _digest(state) for name, state in stateful.take().items()}
    results["the global generators"] = _digest(rng_state(run.state.device))
    return Outcome(attributes(run), results)


def attributes(run: Run) -> Snapshot:
    """The plain values, tensors and arrays in attributes of the model, the task and the data sets, by path."""
    return attributes_of(run.state.stateful.roots, _leaf)


def attributes_of(roots: Mapping[str, Any], leaf_of: Callable[[Any], Any]) -> Snapshot:
    """What is in the attributes of these objects, by path. leaf_of: something comparable for a value, NO_LEAF for one
    whose own attributes or items are to be looked at.
    """
    found: Snapshot = {}
    seen: set[int] = set()
    for root, held in roots.items():
        _add(found, root, held, leaf_of, seen, 0)
    return found


def _add(found: Snapshot, name: str, held: Any, leaf_of: Callable[[Any], Any], seen: set[int], depth: int) -> None:
    leaf = leaf_of(held)
    if leaf is not NO_LEAF:
        found[name] = leaf
        return
    if id(held) in seen or depth > DEPTH or moves_at_commit(held):
        return
    seen.add(id(held))
    parts: Iterable[tuple[Any, Any]]
    if isinstance(held, torch.nn.Module):
        parts = (
            (".".join(filter(None, (path, attribute))), value)
            for path, module in held.named_modules()
            for attribute, value in vars(module).items()
            if attribute not in MODULE_ATTRIBUTES and not callable(value)
        )
    elif isinstance(held, (list, tuple, deque, dict)):
        found[f"len({name})"] = len(held)
        parts = list(held.items() if isinstance(held, dict) else enumerate(held))[-MOST_ITEMS:]
    elif isinstance(held, (set, frozenset)):
        parts = enumerate(sorted(map(repr, held))[:MOST_ITEMS])
    else:
        parts = children(held)
    for part, value in parts:
        _add(found, f"{name}.{part}" if part != "" else name, value, leaf_of, seen, depth + 1)


NO_LEAF = object()


def plain_leaf(value: Any) -> Any:
    """Something comparable for a plain value or an array; NO_LEAF for others."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        sums = checksum(torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8)))
        return Contents("an array", value.shape, str(value.dtype), str(sums.tolist()))
    return NO_LEAF


def _leaf(value: Any) -> Any:
    """The same, and of tensors."""
    if isinstance(value, Tensor):
        tensor = local(value.detach())
        if tensor.layout is torch.strided and not tensor.is_meta:
            return Contents("a tensor", tuple(tensor.shape), str(tensor.dtype), str(checksum(tensor).tolist()))
    return plain_leaf(value)


def _digest(state: Any) -> str:
    """Empty for a state that holds more than plain values and tensors."""
    try:
        return digest(encoded(state, ""))
    except UserError:
        return ""


def differences(a: Snapshot, b: Snapshot) -> dict[str, tuple[Any, Any]]:
    """What differs, by path, with both values. NaN equals NaN."""
    pairs = {name: (a.get(name, "absent"), b.get(name, "absent")) for name in a | b}
    return {name: (x, y) for name, (x, y) in pairs.items() if type(x) is not type(y) or (x != y and repr(x) != repr(y))}
