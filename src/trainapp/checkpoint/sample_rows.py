"""Rows of samples on several ranks: what a checkpoint holds of buffers with a row per sample (`per_sample_buffers`)."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainapp.models.inspect import changed_elements, per_sample_buffers
from trainapp.parallel.ranks import Ranks
from trainapp.units import listed

log = logging.getLogger(__name__)
Rows = dict[str, Tensor]  # a rank's buffers with a row per sample, by name


class SampleRows:
    """The model's `per_sample_buffers`. Each rank writes the rows of its own samples, and those of the others' are old.

    What a rank has changed since all ranks were equal are its rows. If no two ranks have changed the same elements, a
    save joins them: the buffer is then the one that a single rank would have. Otherwise the model does not index the
    rows by sample (`hidden[:len(inputs)]`), and each rank keeps its own, in the checkpoint too.

    Args:
        model: as it is trained.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._common: Rows = {}  # the values that all ranks had last, in host memory
        self._kept_by_rank: set[str] = set()  # buffers with rows of their own on each rank when the run was resumed

    @property
    def names(self) -> set[str]:
        """The names of the buffers in the model."""
        names = per_sample_buffers({"model": self.model})
        return {name.removeprefix("model.") for name in names}

    def _buffers(self) -> Rows:
        """Return the buffers that exist now."""
        names = self.names
        return {name: buffer for name, buffer in self.model.named_buffers() if name in names}

    def begin(self, ranks: Ranks) -> None:
        """Record the values before the first step, which all ranks share."""
        if ranks.world_size == 1:
            return
        for name, buffer in self._buffers().items():
            if name not in self._kept_by_rank:
                self._common[name] = _on_host(buffer)

    @torch.no_grad()
    def join(self, ranks: Ranks) -> list[Rows]:
        """Give all ranks the rows of all samples. Return the buffers that cannot be joined, by rank. Collective."""
        if ranks.world_size == 1 or not self.names:  # classes declare them, so that they are equal on all ranks
            return []
        buffers = self._buffers()

        # States of a recurrent network are small: every rank may have those of all.
        buffers_by_rank = ranks.all_gather_object({name: _on_host(buffer) for name, buffer in buffers.items()})
        apart: list[Rows] = [{} for _ in buffers_by_rank]
        for name, buffer in buffers.items():
            versions = [rows[name] for rows in buffers_by_rank if name in rows]
            joined = None
            if name in self._common:
                joined = _joined(self._common[name], versions)
            if joined is not None:
                buffer.copy_(joined)
                self._common[name] = joined
            elif len(versions) == ranks.world_size:
                for rows, version in zip(apart, versions, strict=True):
                    rows[name] = version
        return apart if apart[0] else []

    @torch.no_grad()
    def load(self, saved: Sequence[Rows], ranks: Ranks) -> None:
        """Restore the buffers that could not be joined: on as many ranks each rank's own, otherwise those of rank 0,
        with a warning.

        Args:
            saved: the result of `join`.
            ranks: those of this run.
        """
        if not saved:
            return
        rows = saved[0]
        if len(saved) == ranks.world_size:
            rows = saved[ranks.rank]
            self._kept_by_rank.update(rows)
        else:
            names = listed([f"model.{name}" for name in sorted(rows)])
            log.warning(
                "the checkpoint was written by %d ranks, which wrote the same rows of %s (per_sample_buffers), each "
                "for its own samples: rank 0's are used, and those of other ranks are lost; resume on %d ranks, or "
                "index the rows by the sequence's number in the batch, so that a save can join them",
                len(saved),
                names,
                len(saved),
            )
        buffers = self._buffers()
        for name, version in rows.items():
            if name in buffers and buffers[name].shape == version.shape:
                buffers[name].copy_(version)


def _on_host(buffer: Tensor) -> Tensor:
    return buffer.detach().cpu().clone()


def _joined(common: Tensor, versions: Sequence[Tensor]) -> Tensor | None:
    """Return the ranks' versions of a buffer as one: what each has changed in the `common` one. None if two ranks have
    changed the same element, or the buffer's shape or dtype.
    """
    joined = common.clone()
    changed_before = torch.zeros(common.shape, dtype=torch.bool)
    for version in versions:
        if version.shape != common.shape or version.dtype != common.dtype:
            return None
        changed = changed_elements(common, version)
        if (changed & changed_before).any():
            return None
        changed_before |= changed
        joined[changed] = version[changed]
    return joined
