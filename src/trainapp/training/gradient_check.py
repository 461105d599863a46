"""Looks at gradients where that is cheap: in the first step of a process, at what the loss depends on and the gradients
that result; while a size is unvalidated, at whether the task leaves the gradients of earlier micro-batches alone.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.units import listed


@contextlib.contextmanager
def checked_gradients(model: nn.Module, loss: Tensor) -> Iterator[None]:
    """Use around the backward that completes the gradients of a step. Walks the graph: some milliseconds.

    Raises UserError for parameters that receive a gradient but are not the model's, since nothing would ever train
    them, and for sparse gradients, which clipping and most optimizers cannot take.
    """
    leaves = list(parameters_behind(loss))
    yield
    # After the backward, because only then can FSDP2's gathered parameters be told apart: their gradients have moved
    # into the shards.
    own = {id(p) for p in model.parameters()}
    foreign = [p for p in leaves if id(p) not in own and p.grad is not None]
    if foreign:
        shapes = listed(str(list(p.shape)) for p in foreign)
        raise UserError(
            f"the loss depends on {len(foreign)} parameters that are not among model.parameters() (of shape "
            f"{shapes}), which nothing would train: make the module that owns them a submodule of the model, in "
            "place of a global, a plain list or an attribute of the task; or freeze them with requires_grad_(False)"
        )
    sparse = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.layout != torch.strided]
    if sparse:
        raise UserError(
            f"the gradient of {sparse[0]} is sparse, which clipping, the gradient norm and most optimizers cannot "
            "take; use sparse=False"
        )


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """The gradients themselves, None where there is none."""
    return [parameter.grad for parameter in parameters]


def require_same_gradients(parameters: Iterable[Tensor], before: list[Tensor | None]) -> None:
    """Raises UserError where a task has replaced gradients. They are summed over micro-batches: the result would depend
    on how the batch is cut.
    """
    if any(now is not then for now, then in zip(gradients_of(parameters), before, strict=True)):
        raise UserError(
            "the task changes the gradients of the model's parameters, by a backward() or a zero_grad() of its own: "
            "they hold the sum over the micro-batches so far; use torch.autograd.grad for gradients inside a task"
        )


def parameters_behind(loss: Tensor) -> Iterator[nn.Parameter]:
    """The parameters that a backward from `loss` reaches."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the nodes that accumulate into leaves
        if isinstance(variable, nn.Parameter):
            yield variable
        nodes += [following for following, _ in node.next_functions]
