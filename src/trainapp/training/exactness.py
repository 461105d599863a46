"""`train.check_exactness`: runs each of the first three steps twice from the same `Snapshot`, and compares.

It finds causes for which a retry would silently differ: state that no snapshot holds, such as a counter in an attribute
of a task, a global variable or a file, and kernels that add in a nondeterministic order.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainapp.checkpoint.state_dicts import digest, encoded
from trainapp.errors import TrainingStopped, UserError
from trainapp.snapshot import checksum
from trainapp.torch_private import local
from trainapp.training.engine import Totals
from trainapp.training.phase import Phase, Step
from trainapp.training.session import Session
from trainapp.training.transaction import around, micro_batches, rollback
from trainapp.units import listed

STEPS = 3
MOST_FINDINGS = 5
PROTOCOL = (
    "A retry restores buffers, plain values and tensors in attributes of modules, and what has a state_dict (a module: "
    "get_extra_state): keep it in one of them (docs/oom.md)"
)


def rehearse(session: Session, step: Step, accumulate: Callable[..., Totals]) -> None:
    """Accumulate the step's gradients twice, undo both, and compare. accumulate: see `training.loop`.

    Raises TrainingStopped if the outcomes differ on any rank. Collective.
    """
    engine, outcomes = session.engine, []
    engine.rehearses = True
    for _ in range(2):
        totals = accumulate(engine, micro_batches(session), functools.partial(around, session))
        outcomes.append(outcome(session, totals))
        rollback(session, Phase.GRADIENTS, other_ranks_wait=session.ranks.world > 1)
        engine.seed(step)
    engine.rehearses, engine.phase = False, Phase.DATA
    first, second = outcomes
    changed = [name for name in first | second if first.get(name) != second.get(name)]
    by_rank = [names for names in session.ranks.all_gather_object(changed) if names]
    if by_rank:
        raise TrainingStopped(_message(by_rank[0], step, session.config.train.deterministic, session.state.device))
    session.rehearsals -= 1
    if not session.rehearsals:
        session.tracker.note(f"check_exactness: retrying each of the first {STEPS} steps gives the same result")


def outcome(session: Session, totals: Totals) -> dict[str, Any]:
    """The results of a step's forward and backward, by name, for comparison: totals, gradients, tensors and states."""
    state = session.state
    found = {"the loss": _bits(totals.loss), "the count": _bits(totals.count)}
    found |= {f"the metric {name}": tuple(map(_bits, metric)) for name, metric in totals.metrics.items()}
    found |= {f"the gradient of model.{name}": _bits(p.grad) for name, p in state.model.named_parameters()}
    for root, module in {"model": state.model, **state.stateful.modules}.items():
        tensors = (*module.named_parameters(), *module.named_buffers())
        found |= {f"{root}.{name}": _bits(tensor) for name, tensor in tensors}
    return found | {name: _digest(owner.copy()) for name, owner in state.stateful.owners.items() if not owner.is_held}


def _bits(value: Any) -> Any:
    """A comparable value: shape, dtype and checksum of a tensor; the text of a number, in which nan equals nan."""
    if not isinstance(value, Tensor):
        return repr(value)
    tensor = local(value.detach())
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tuple(tensor.shape), tensor.dtype, checksum(tensor).tolist()


def _digest(state: Any) -> str:
    """A digest; empty for a state that holds more than plain values and tensors."""
    try:
        return digest(encoded(state, ""))
    except UserError:
        return ""


def _message(names: list[str], step: Step, is_deterministic: bool, device: torch.device) -> str:
    found = f"  two runs of step {step.number} from the same state differ in {listed(names, MOST_FINDINGS)}"
    advice = f"Something that a retry does not restore has changed. {PROTOCOL}"
    if not is_deterministic:
        advice += f"; or the kernels ({device.type}) are nondeterministic, which train.deterministic=true prevents"
    return "\n".join(["train.check_exactness=true: a retried step would not be the same", found, advice])
