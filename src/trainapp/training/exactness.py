"""`train.check_exactness`: runs each of the first three steps twice from the same `Snapshot`, and compares.

It finds causes for which a retry would silently differ: state that no snapshot holds, such as a counter in an attribute
of a task, a global variable or a file, and kernels that add in a nondeterministic order.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainapp.checkpoint.plain_values import digest, encoded
from trainapp.errors import TrainingStopped, UserError
from trainapp.state.checksum import checksum
from trainapp.torch_private import local
from trainapp.training.attempt import rollback
from trainapp.training.engine import Totals
from trainapp.training.memory_watch import micro_batch_context, watched
from trainapp.training.phase import Phase, UpdateContext
from trainapp.training.session import Session
from trainapp.units import listed

STEPS = 3
MOST_FINDINGS = 5
PROTOCOL = (
    "A retry restores buffers, plain values and tensors in attributes of modules, and what has a state_dict (a module: "
    "get_extra_state): keep it in one of them (docs/oom.md)"
)


def require_same_twice(session: Session, context: UpdateContext, accumulate: Callable[..., Totals]) -> None:
    """Accumulate the step's gradients twice, undo both, and compare. Collective.

    Raises TrainingStopped if the outcomes differ on any rank.

    Args:
        context: the coming update.
        accumulate: the function of `training.loop`.
    """
    engine = session.engine
    engine.only_compares = True

    # Run the step twice, each time from the same snapshot and seeds.
    outcomes = []
    for _ in range(2):
        batches = engine.prepare(session.micro_batches(), functools.partial(watched, session, session.sizes.train))
        totals = accumulate(engine, batches, functools.partial(micro_batch_context, session))
        outcomes.append(outcome(session, totals))
        rollback(session, Phase.GRADIENTS, other_ranks_wait=session.ranks.world_size > 1)
        engine.seed(context)
    engine.only_compares = False

    # All ranks stop if any has found a difference, with the names of the first that has.
    first, second = outcomes
    changed = [name for name in first | second if first.get(name) != second.get(name)]
    for names in session.ranks.all_gather_object(changed):
        if names:
            is_deterministic = session.config.train.deterministic
            raise TrainingStopped(_message(names, context, is_deterministic, session.state.device))

    session.exactness_checks_left -= 1
    if not session.exactness_checks_left:
        session.tracker.note(f"check_exactness: retrying each of the first {STEPS} steps gives the same result")


def outcome(session: Session, totals: Totals) -> dict[str, Any]:
    """Return the results of a step's forward and backward, by name, for comparison: totals, gradients, tensors and
    states.
    """
    state = session.state
    results: dict[str, Any] = {"the loss": _bits(totals.loss), "the count": _bits(totals.count)}
    for name, sums in totals.metrics.items():
        results[f"the metric {name}"] = tuple(map(_bits, sums))
    for name, parameter in state.model.named_parameters():
        results[f"the gradient of model.{name}"] = _bits(parameter.grad)

    # What forwards have written, in modules and in other objects with a state.
    modules = {"model": state.model, **state.stateful.modules}
    for root, module in modules.items():
        tensors = (*module.named_parameters(), *module.named_buffers())
        for name, tensor in tensors:
            results[f"{root}.{name}"] = _bits(tensor)
    for name, owner in state.stateful.owners.items():
        if not owner.is_restored_elsewhere:
            results[name] = _digest(owner.copy())
    return results


def _bits(value: Any) -> Any:
    """Return what can be compared: shape, dtype and checksum of a tensor; the text of a number: nan equals nan."""
    if not isinstance(value, Tensor):
        return repr(value)
    tensor = local(value.detach())
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tuple(tensor.shape), tensor.dtype, checksum(tensor).tolist()


def _digest(state: Any) -> str:
    """Return a digest; empty for a state that holds more than plain values and tensors."""
    try:
        return digest(encoded(state, ""))
    except UserError:
        return ""


def _message(names: list[str], context: UpdateContext, is_deterministic: bool, device: torch.device) -> str:
    step = context.step_number
    finding = f"  two runs of step {step} from the same state differ in {listed(names, MOST_FINDINGS)}"
    advice = f"Something that a retry does not restore has changed. {PROTOCOL}"
    if not is_deterministic:
        advice += f"; or the kernels ({device.type}) are nondeterministic, which train.deterministic=true prevents"
    return "\n".join(["train.check_exactness=true: a retried step would not be the same", finding, advice])
