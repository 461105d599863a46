"""The embeddings of a task that offers them: `embed(model, batch)` and `loss_of_embeddings(embeddings)`.

They are a tensor, or a tuple, list, dict or dataclass of tensors, whose first dimension is the samples. Those of
several micro-batches are joined there, so that the loss sees the same structure with more rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import map_tensors, opened_container, tensors_in
from trainapp.errors import UserError
from trainapp.torch_private import version_of


def embed(task: Any, model: nn.Module, batch: Any, samples: int | None = None) -> Any:
    """What the task's `embed` returns for a batch. Raises UserError for what cannot be joined.

    samples: in the batch, where that is known. The task gets containers of its own: it may take things out of them.
    """
    held = tensors_in(batch)
    before = list(map(version_of, held))
    embeddings = task.embed(model, map_tensors(lambda tensor: tensor, batch))
    _require_rows(embeddings, samples, task.setting)
    if list(map(version_of, held)) != before:
        raise UserError(
            f"{task.setting}: its embed changes tensors of the batch in place, and is called twice with them; let "
            "it work on copies (.clone())"
        )
    return embeddings


def _require_rows(embeddings: Any, samples: int | None, setting: str) -> None:
    found = list(_leaves(embeddings, setting))
    if not found:
        raise UserError(f"{setting}: its embed returns no tensor; return the embeddings of the batch's samples")
    rows = len(found[0]) if samples is None and found[0].ndim else samples
    for tensor in found:
        if not tensor.ndim or len(tensor) != rows:
            raise UserError(
                f"{setting}: its embed returns a tensor of shape {list(tensor.shape)} for {rows or 1} samples; "
                "the first dimension must be the samples, so that micro-batches can be joined (several views of a "
                "sample go into a second dimension, or into tensors of their own)"
            )
        if tensor.is_complex():
            raise UserError(f"{setting}: its embed returns {tensor.dtype}; return torch.view_as_real(...)")


def _leaves(embeddings: Any, setting: str) -> Iterator[Tensor]:
    if isinstance(embeddings, Tensor):
        yield embeddings
        return
    opened = opened_container(embeddings)
    if opened is None:
        raise UserError(
            f"{setting}: its embed must return a tensor, or a tuple or dict of tensors, but there is a "
            f"{type(embeddings).__name__} in what it returns"
        )
    for child in opened[0]:
        yield from _leaves(child, setting)


def join(parts: list[list[Tensor]], setting: str) -> list[Tensor]:
    """The tensors of several micro-batches, next to each other. Raises UserError where they do not fit."""
    if len({len(part) for part in parts}) > 1:
        raise UserError(f"{setting}: its embed returns {len(parts[0])} tensors for one micro-batch and another "
                        "number for the next; return the same structure for each")  # fmt: skip
    for tensors in zip(*parts, strict=True):
        forms = sorted({(tuple(t.shape[1:]), str(t.dtype)) for t in tensors})
        if len(forms) > 1:
            found = " and ".join(f"{list(shape)} of {dtype.removeprefix('torch.')}" for shape, dtype in forms[:2])
            raise UserError(
                f"{setting}: the embeddings of two micro-batches have rows of shape {found}, which cannot be "
                "joined; make them independent of the batch, such as of its padding"
            )
    return [torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True)]


def like(structure: Any, tensors: list[Tensor]) -> Any:
    """A structure as `embed` has returned it, with these tensors."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), structure)
