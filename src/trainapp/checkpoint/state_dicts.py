"""The state of models and of other owners of state as stored in checkpoints.

Tensors are the state dict's own, whole or sharded: the checkpoint writes them, and fills them in place. Everything else
is plain values (`plain_values`).
"""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain_values import decoded, encoded
from trainapp.checkpoint.shards import Sizes
from trainapp.errors import add_note
from trainapp.models import adapters
from trainapp.parallel.ranks import Ranks
from trainapp.state.stateful import Stateful, is_expanded
from trainapp.torch_private import EXTRA_STATE, version_of


class _BuiltTensor(NamedTuple):
    """A tensor of the newly built model."""

    shape: torch.Size
    reference: weakref.ref[Tensor]
    version: int


class ModelState:
    """The state of one model. Create it for a newly built model: later differences are training's changes."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._frozen: frozenset[str] = frozenset()
        base = adapters.base_of(model)
        if base is not None:
            self._frozen = base.names
        self._built: dict[str, _BuiltTensor] = {}
        for name, tensor in self._named_tensors():
            self._built[name] = _BuiltTensor(tensor.shape, weakref.ref(tensor), version_of(tensor))

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the entries of the model's state dict, without extra state, which `Stateful` saves per rank."""
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] != EXTRA_STATE:
                yield name, value

    def _has_changed(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor was replaced or written since the model was built."""
        built = self._built.get(name)
        return built is None or built.reference() is not tensor or built.version != version_of(tensor)

    def values(self, ranks: Ranks) -> dict[str, Any]:
        """Return what a checkpoint holds besides `tensors`, as plain values; equal on all ranks except `entries`.
        Collective.

        entries: what modules add to the state dict other than dense tensors. left_out: see `left_out`. written: of a
        model with adapters, names in its frozen base that forwards have written nevertheless, as with a momentum
        teacher.
        """
        entries = {}
        for name, value in self._entries():
            if not _is_dense(value):
                entries[name] = encoded(value, f"{name} of the model's state dict")

        # What any rank has written is saved by all.
        written = []
        for name, parameter in self.model.named_parameters():
            if name in self._frozen and self._has_changed(name, parameter):
                written.append(name)
        written_on_any_rank = set[str]().union(*ranks.all_gather_object(written))
        return {"entries": entries, "left_out": self.left_out(), "written": sorted(written_on_any_rank)}

    def tensors(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """Return the dense tensors of the state dict, by name. One with several names, such as a tied weight, has the
        first.

        Excludes everything that is `left_out` now or was then, and the frozen base of a model with adapters, except
        what is `written`.

        Args:
            values: the `values` saved with them.
        """
        # Tensors that are not saved, by id, and names.
        frozen = self._frozen.difference(values["written"])
        excluded = {id(parameter) for name, parameter in self.model.named_parameters() if name in frozen}
        left_out = {*self.left_out(), *values["left_out"]}

        tensors = {}
        for name, value in self._entries():
            if _is_dense(value) and id(value) not in excluded and name not in left_out:
                excluded.add(id(value))  # under further names
                tensors[name] = value.detach()
        return tensors

    def buffers(self, saved: Sizes | None = None) -> dict[str, Tensor]:
        """Return buffers outside of the state dict (`persistent=False`): those that have changed since the model was
        built, or the `saved` ones.
        """
        names_elsewhere = {name for name, _ in self._entries()}
        names_elsewhere.update(self.left_out())

        buffers = {}
        for name, buffer in self.model.named_buffers():
            if name in names_elsewhere:
                continue
            # To save: what differs from a fresh model. To load: what was saved and still fits.
            if saved is None:
                is_included = self._has_changed(name, buffer)
            else:
                saved_name = f"buffers.{name}"
                is_included = saved_name in saved and saved[saved_name][0] == buffer.shape
            if is_included:
                buffers[name] = buffer
        return buffers

    def load_values(self, saved: dict[str, Any]) -> None:
        """Restore `values`, and copies that hooks make of tensors. Call after filling `tensors`."""
        filled_in_place = {id(tensor) for _, tensor in self._named_tensors()}
        entries = dict(self._entries()) | decoded(saved["entries"])
        if any(id(value) not in filled_in_place for value in entries.values()):
            self.model.load_state_dict(entries, strict=False)  # without extra state, which has its own owner

    def left_out(self) -> list[str]:
        """Return the names of tensors that a fresh model lacks or has in another shape (a forward registers, fills or
        grows them), and names that a fresh model has but this one no longer.
        """
        # Tensors that cannot be filled: their elements share memory.
        shapes = {}
        expanded = set()
        for name, tensor in self._named_tensors():
            shapes[name] = tensor.shape
            if is_expanded(tensor):
                expanded.add(name)

        # Tensors that are new, gone or of another shape.
        built_shapes = {name: built.shape for name, built in self._built.items()}
        names = shapes.keys() | built_shapes.keys()
        reshaped = {name for name in names if shapes.get(name) != built_shapes.get(name)}
        return sorted(reshaped | expanded)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


# --- objects with their own state


def stateful_values(stateful: Stateful) -> dict[str, Any]:
    """Return the states of all owners, by name. Raises UserError for a state with anything but plain values and
    tensors.
    """
    values = {}
    for name, owner in stateful.owners.items():
        values[name] = encoded(owner.get(), f"the state of {name}")
    return values


def load_stateful(stateful: Stateful, saved: dict[str, Any]) -> list[str]:
    """Restore the `stateful_values` of owners that have one in `saved`. Return the names that only one side has.

    An error of the owner's own method gets a note with its name.
    """
    for name in sorted(stateful.owners.keys() & saved.keys()):
        try:
            stateful.owners[name].set(decoded(saved[name]))
        except Exception as error:
            add_note(error, f"{name}: it does not take its state in the checkpoint")
            raise
    return sorted(stateful.owners.keys() ^ saved.keys())
