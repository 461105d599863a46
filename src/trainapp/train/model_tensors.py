"""The parameters and buffers of a model at one point, to return to.

A forward may write any of them: a momentum teacher, a codebook, weights that are normalised in place, an initialisation
from the first batch. Copying every parameter would take the memory of a second model, so that copies are made only of
what is known to be written; of the rest it is noticed.
"""

import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainapp.checksum import checksum
from trainapp.parallel.dtensor import is_shard, local
from trainapp.torch_private import (
    foreach_copy_,
    non_persistent_buffers,
    outside_dispatch_modes,
    registries_of,
    storage_id,
    version_of,
)

_PLAIN = (Tensor, nn.Parameter)
Pairs = list[tuple[list[Tensor], list[Tensor]]]  # lists of tensors, and of those that are copied into them


class ModelTensors:
    """Records the parameters and buffers of modules: which there are (`None`, new and replaced ones too), and contents.

    | what | how its contents are restored |
    |---|---|
    | a buffer in the state dict | copied in every `take`: BatchNorm's kernels write its statistics without a trace |
    | another buffer (a rotary table, a mask) | copied in a `take` that finds it changed |
    | a parameter | copied in every `take` once a forward is known to have written it |

    A write is known by the tensor's version. An assignment to `.data` moves none: the memory of before is kept and put
    back. Other writes without a trace (`.data.mul_()`, NumPy) are found by checksums, in a `take` with `verify`.

    written: parameters, by name, that a forward has written, and whether only in the first step. Those are dropped
    after the second step: an initialisation from data should not cost a copy of the weights for the rest of the run.
    """

    def __init__(self, roots: Mapping[str, nn.Module]):
        self._roots = roots
        self.written: dict[str, bool] = {}
        self._steps = 0
        self._verify = False
        # FSDP2 swaps these for gathered parameters in every forward, and swaps them back itself.
        self._shards: dict[tuple[int, str], Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._copied_at: dict[str, tuple[int, int]] = {}  # version and place of a constant at its last copy
        self._scan()
        for registry in self._registries:
            self._shards |= {(id(registry), name): t for name, t in registry.items() if is_shard(t)}

    def _scan(self) -> None:
        """Find all tensors: parameters first, then buffers."""
        modules = [(root, path, m) for root, top in self._roots.items() for path, m in top.named_modules()]
        self._registries: list[dict[str, Any]] = [r for _, _, module in modules for r in registries_of(module)]
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._always: list[int] = []  # positions of what every `take` copies
        self._constant: list[int] = []
        seen: set[int] = set()
        for holds_buffers in (0, 1):
            self._parameters = len(self._tensors) if holds_buffers else 0  # how many of the tensors
            for root, path, module in modules:
                registry, constants = registries_of(module)[holds_buffers], non_persistent_buffers(module)
                for name, held in registry.items():
                    tensor = self._shards.get((id(registry), name), held)
                    if tensor is None or id(tensor) in seen or not _can_be_held(tensor):
                        continue
                    seen.add(id(tensor))
                    if holds_buffers:
                        (self._constant if name in constants else self._always).append(len(self._tensors))
                    self._names.append(".".join(filter(None, (root, path, name))))
                    with torch.no_grad():
                        self._tensors.append(local(tensor))
        self._filled = [registry for registry in self._registries if registry]
        self._values = [*chain.from_iterable(map(dict.values, self._filled))]
        self._place: Callable[[Tensor], int] = Tensor.data_ptr if all(map(_has_memory, self._tensors)) else _storage
        self._aliases: list[Tensor] = []
        self._places: list[int] = []
        self._pairs: Pairs | None = None  # copies of what is always copied, and sources

    def take(self, verify: bool = False, everything: bool = False) -> None:
        """Record the current state.

        verify: also take checksums of what is not copied, and look at all modules again. everything: copy every
        parameter.
        """
        if verify or sum(map(len, self._registries)) != len(self._values) or not self._holds_the_same():
            self._scan()
        self._contents = list(map(dict.copy, self._filled))
        self._versions = list(map(version_of, self._tensors))
        places = list(map(self._place, self._tensors))
        if places != self._places:
            # Keeps the memory alive: until the next `take`, no other tensor can have its address.
            self._places, self._aliases = places, [tensor.data for tensor in self._tensors]
            self._pairs = None
        self._verify = verify
        self._copy(everything)
        self._sums: dict[int, Tensor] = {}
        if verify:
            unsure = (*range(self._parameters), *self._constant)
            with outside_dispatch_modes():  # counting live tensors would take longer than the sums
                self._sums = {i: checksum(self._aliases[i]) for i in unsure if _has_memory(self._aliases[i])}

    def _holds_the_same(self) -> bool:
        values = chain.from_iterable(map(dict.values, self._filled))
        return all(map(operator.is_, values, self._values))

    def _copy(self, everything: bool) -> None:
        parameters: list[int] = []
        if everything or self.written:
            parameters = [i for i in range(self._parameters) if everything or self._names[i] in self.written]
        constant: list[int] = []
        if self._constant:
            constant = [i for i in self._constant if self._may_have_changed(i)]
        if self._pairs is None:
            self._pairs = self._copies_of(self._always)
        pairs = self._pairs
        if constant or parameters:
            pairs = [*pairs, *self._copies_of(constant + parameters)]
        for targets, sources in pairs:  # the sources are aliases, without gradients: `no_grad` would cost as much
            foreach_copy_(targets, sources)
        for i in constant:
            self._copied_at[self._names[i]] = (self._versions[i], self._places[i])
        self._copied_parameters = parameters

    def _may_have_changed(self, constant: int) -> bool:
        name, now = self._names[constant], (self._versions[constant], self._places[constant])
        return self._verify or name in self.written or self._copied_at.get(name) != now

    def _copies_of(self, positions: list[int]) -> Pairs:
        """Memory for copies, and what to copy into it: by device and dtype. BatchNorm counts its batches in integers,
        and CUDA copies a mixed list with a launch per tensor (ForeachBinaryOpList.cu at pytorch's commit 00a1abb).
        """
        pairs: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for i in positions:
            copy, source = self._copies.get(self._names[i]), self._aliases[i]
            if copy is None or copy.shape != source.shape or copy.dtype != source.dtype or copy.device != source.device:
                copy = self._copies[self._names[i]] = torch.empty_like(source)
            targets, sources = pairs.setdefault((source.device, source.dtype), ([], []))
            targets.append(copy)
            sources.append(source)
        return list(pairs.values())

    def note_written(self) -> None:
        """Remember which parameters have been written since `take`. Call before anything else changes them."""
        self.written |= {self._names[i]: False for i in self._written()}

    def note_step(self) -> None:
        """`note_written` for a step whose gradients are complete, before its commit."""
        if self._steps >= 2 and not self._verify and self._versions[: self._parameters] == self._current_versions():
            return  # the healthy path
        found = {self._names[i] for i in self._written()}
        self._steps += 1
        if self._steps == 1:
            self.written = dict.fromkeys(found, True) | self.written
            return
        if self._steps == 2:
            dropped = {name for name, only_first in self.written.items() if only_first} - found
            for name in dropped:
                del self.written[name]
                self._copies.pop(name, None)
        self.written |= dict.fromkeys(found, False)

    def _current_versions(self) -> list[int]:
        return list(map(version_of, self._tensors[: self._parameters]))

    def _written(self) -> list[int]:
        """Which have been written since `take`, in the memory that they had then: parameters, and constants without a
        trace.
        """
        now = self._current_versions()
        moved = [i for i, version in enumerate(now) if version != self._versions[i]]
        return moved + self._written_silently() if self._sums else moved

    def _written_silently(self) -> list[int]:
        with outside_dispatch_modes():
            return [
                i
                for i, before in self._sums.items()
                if version_of(self._tensors[i]) == self._versions[i]
                and not torch.equal(checksum(self._aliases[i]), before)
            ]

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Return to the last `take`. Returns the names of parameters that were written and of which there is no copy:
        those are not restored.
        """
        written, copied = self._written(), {*self._always, *self._constant, *self._copied_parameters}
        self._restore_registries()
        for position, tensor in enumerate(self._tensors):
            self._restore_memory(position)
            if position in copied:
                tensor.copy_(self._copies[self._names[position]])
        for position in written:
            self.written.setdefault(self._names[position], self._steps == 0)
        return [self._names[position] for position in written if position not in copied]

    def _restore_registries(self) -> None:
        contents = dict(zip(map(id, self._filled), self._contents, strict=True))
        for registry in self._registries:
            before = contents.get(id(registry), {})
            kept = {n: t for n, t in before.items() if (id(registry), n) not in self._shards}
            kept |= {n: t for n, t in registry.items() if (id(registry), n) in self._shards}
            if kept.keys() != registry.keys() or any(kept[n] is not registry[n] for n in kept):
                ordered = {n: kept[n] for n in before if n in kept}
                registry.clear()
                registry.update(ordered)

    def _restore_memory(self, position: int) -> None:
        """Undo an assignment to `.data`."""
        tensor, before = self._tensors[position], self._aliases[position]
        if self._place(tensor) != self._places[position] or tensor.shape != before.shape:
            tensor.data = before


def _can_be_held(tensor: Tensor) -> bool:
    """Not where there is nothing yet (lazy modules), nor where in-place writes are impossible: an inference tensor, or
    an expanded one, whose elements share memory.
    """
    if is_lazy(tensor) or tensor.is_inference():
        return False
    if tensor.layout is not torch.strided:
        return True
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _has_memory(tensor: Tensor) -> bool:
    """Whether `data_ptr` tells where the tensor is: not for sparse, meta and fake tensors."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage()) if tensor.layout is torch.strided else 0
