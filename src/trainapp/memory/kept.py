"""Tensors that outlive a step and are neither parameters nor buffers of the model nor optimizer state: a memory bank in
a list, the queue of a loss, a teacher, the last output of a model. They count as long as they live. What the data sets
hold never counts.

Storages are held weakly: counting must not keep anything alive.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from trainapp.parallel.strategy import local
from trainapp.torch_private import storage_id

Tensors = Callable[[], Iterable[Tensor]]
# Bytes. Scalars are not carried: a run has a few of its own, such as the loss scale, which a trace has at another time.
LEAST = 64


class WeakStorages:
    """A set of storages, by `storage_id`. One that is freed is no longer in it, whatever then gets its address."""

    def __init__(self, storages: Iterable[torch.UntypedStorage] = ()):
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for storage in storages:
            self.add(storage)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add one."""
        self._refs[storage_id(storage)] = weakref.ref(storage)

    def __contains__(self, key: int) -> bool:
        """key: a `storage_id`."""
        return key in self._refs and self._refs[key]() is not None

    def __iter__(self) -> Iterator[torch.UntypedStorage]:
        """Those that exist. Drops the others."""
        self._refs = {key: ref for key, ref in self._refs.items() if ref() is not None}
        for ref in list(self._refs.values()):
            if (storage := ref()) is not None:
                yield storage


class KeptStorages:
    """Of one run: the storages that exist between watched blocks.

    owned: the tensors that model and task hold in plain attributes. They are looked up before each block, since blocks
    in between were not watched. data: those of the data sets. stand_in: what counts in place of an
    owned tensor; a trace has tensors without data for them.
    """

    def __init__(self, owned: Tensors = tuple, data: Tensors = tuple):
        self._owned, self._data = owned, data
        self.stand_in: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.carried = WeakStorages()  # what watched blocks have left
        self._of_data: WeakStorages | None = None

    @property
    def of_data(self) -> WeakStorages:
        """The storages of the data sets. A sample may be a view of one, as a row of a table is."""
        if self._of_data is None:
            strided = (tensor for tensor in self._data() if tensor.layout is torch.strided)
            self._of_data = WeakStorages(local(tensor).untyped_storage() for tensor in strided)
        return self._of_data

    def owned(self) -> Iterator[Tensor]:
        """The tensors in attributes, as they count."""
        return (self.stand_in(local(tensor)) for tensor in self._owned())

    def carry(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Add what a block has left, but for what the data sets have loaded or cached meanwhile."""
        left = [storage for storage in storages if storage.nbytes() >= LEAST]
        if any(storage_id(storage) not in self.carried for storage in left):
            self._of_data = None  # look them up again
        for storage in left:
            if storage_id(storage) not in self.of_data:
                self.carried.add(storage)
