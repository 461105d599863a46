"""What the built-in losses give a model of a batch, and what they take from it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.models.inspect import is_of_transformers


def inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """From a mapping with keys "inputs" and "targets", an object with those attributes, or a pair. Raises UserError for
    a mapping that lacks one of them.
    """
    if isinstance(batch, (dict, Mapping)):  # dict first: isinstance with an ABC takes 10 times as long
        try:
            return batch["inputs"], batch["targets"]
        except KeyError as error:
            raise UserError(
                f"the batches have no {error}, only {', '.join(map(str, batch))}: this loss needs inputs and targets; "
                "give data that has both, or a task of your own"
            ) from None
    if hasattr(batch, "inputs") and hasattr(batch, "targets"):  # a dataclass; a namedtuple, in whatever order
        return batch.inputs, batch.targets
    inputs, targets = batch
    return inputs, targets


# What a batch may hold beside inputs and targets that models take by these names, those of Transformers.
BESIDE = ("attention_mask", "position_ids", "token_type_ids")


def beside_inputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The batch's attention mask and the like, by their names. Raises UserError for a model that does not take one of
    them: it would attend to padding, or across documents.
    """
    if not isinstance(batch, (dict, Mapping)):
        return {}
    others = {name: batch[name] for name in BESIDE if name in batch}
    taken = _keywords(type(model).forward) if others else None
    for name in others:
        if taken is not None and name not in taken:
            raise UserError(
                f"the batches have {name}, which the forward of {type(model).__name__} does not take; use a model that "
                "does, data without it (data.pack=false has no position_ids), or a task of your own"
            )
    return others


@functools.lru_cache(maxsize=64)
def _keywords(forward: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a forward's parameters; None for `forward(self, *args, **kwargs)`, which passes on what it gets.

    Beside other names, `**kwargs` are options of Transformers, which ignore unknown names.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    passes_on = {parameter.kind for parameter in parameters} >= {inspect.Parameter.VAR_KEYWORD} and len(names) < 2
    return None if passes_on else frozenset(names)


def predictions(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """`(logits, targets)` of a batch: the logits are what the model returns, or the `logits` in that."""
    inputs, targets = inputs_and_targets(batch)
    others = beside_inputs(model, batch)
    try:
        output = model(inputs, **others)
    except (ValueError, AttributeError, TypeError) as error:
        if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise
        raise UserError(
            f"{type(model).__name__} has an encoder and a decoder, and cannot make predictions of a batch's inputs "
            f"alone ({' '.join(str(error).split())[:200]}); use a model without an encoder, or a task of your own that "
            "gives it what it needs"
        ) from error
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) and is_of_transformers(model):
        raise UserError(
            f"{type(model).__name__} returns no logits (only {', '.join(output)}), which the task's loss is of; choose "
            "a model.task other than base, or a task of your own"
        )
    return logits, targets
