"""The embeddings of a task that offers them: `embed(model, batch)` and `loss_of_embeddings(embeddings)`.

They are a tensor, or a tuple, list, dict or dataclass of tensors, whose first dimension is the samples. Those of
several micro-batches are joined there, so that the loss sees the same structure with more rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.errors import UserError


def embed(task: Any, model: nn.Module, batch: Any, samples: int | None = None) -> Any:
    """What the task's `embed` returns for a batch. Raises UserError for what cannot be joined.

    samples: in the batch, where that is known. The task gets containers of its own: it may take things out of them.
    """
    embeddings = task.embed(model, map_tensors(lambda tensor: tensor, batch))
    found = tensors_in(embeddings)
    if not found:
        raise UserError(
            f"{task.setting}: its embed must return a tensor, or a tuple or dict of tensors: the embeddings of the "
            f"batch's samples, but returned a {type(embeddings).__name__}"
        )
    rows = len(found[0]) if samples is None and found[0].ndim else samples
    for tensor in found:
        if not tensor.ndim or len(tensor) != rows:
            raise UserError(
                f"{task.setting}: its embed returns a tensor of shape {list(tensor.shape)} for {rows or 1} samples; "
                "the first dimension must be the samples, so that micro-batches can be joined (several views of a "
                "sample go into a second dimension, or into tensors of their own)"
            )
    return embeddings


def join(parts: list[list[Tensor]], setting: str) -> list[Tensor]:
    """The tensors of several micro-batches, next to each other. Raises UserError where they do not fit."""
    try:
        return [torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True)]
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"{setting}: the embeddings of two micro-batches cannot be joined ({error}); return the same structure "
            "for each, with rows whose shape does not depend on the batch, such as on its padding"
        ) from error


def like(structure: Any, tensors: list[Tensor]) -> Any:
    """A structure as `embed` has returned it, with these tensors."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), structure)
