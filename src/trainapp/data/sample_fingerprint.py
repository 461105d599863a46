"""Fingerprints of samples: whether a stream that is read again has the same ones."""

import copyreg
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from trainapp.data.batch import node_type
from trainapp.rng import is_generator
from trainapp.torch_private import strided_parts

_MOST_OBJECTS = 100_000  # of classes of the user's in a sample: those that refer to each other have no end
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def fingerprint(sample: Any, opaque: set[str] | None = None) -> str:
    """Equal for samples with equal tensors, arrays, numbers and strings, whatever their containers are made of. The
    order of a mapping or a set does not count.

    An object of any other class is compared by what pickle would store of it. opaque: a set to which the names of the
    types that cannot be compared are added, such as an open file.
    """
    digest = _Digest()
    digest.add(sample)
    if opaque is not None:
        opaque |= digest.opaque
    return digest.hash.hexdigest()


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=12)
        self.opaque: set[str] = set()
        self._path: list[Any] = []  # the objects that hold the present one
        self._objects = 0

    def _mark(self, mark: str) -> None:
        self.hash.update(mark.encode("utf-8", "surrogatepass") + b"\0")

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            self._mark(f"{value.dtype}{value.shape}")
            if value.dtype.hasobject:
                self._add_all(value.reshape(-1).tolist())
            else:
                self.hash.update(value.tobytes())
        elif isinstance(value, Mapping):
            self._add_all(sorted(fingerprint(item, self.opaque) for item in value.items()))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self._mark(f"bytes{len(value)}")
            self.hash.update(value)
        elif isinstance(value, (str, int, float, complex, type(None), np.generic)):
            self._mark(repr(value))
        elif isinstance(value, (set, frozenset)):
            self._add_all(sorted(fingerprint(child, self.opaque) for child in value))
        elif (node := node_type(value)) is not None:
            self._add_all(node.children(value))
        elif isinstance(value, _NAMED):
            self._mark(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}")
        else:
            self._add_object(value)

    def _add_all(self, values: Any) -> None:
        self._mark("(")
        for value in values:
            self.add(value)
        self._mark(")")

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        self._mark(f"{tensor.dtype}{tuple(tensor.shape)}")
        try:
            for part in strided_parts(tensor.detach()):
                plain = part.resolve_conj().resolve_neg().cpu().contiguous()
                self.hash.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        except (RuntimeError, NotImplementedError, TypeError):  # such as a nested or quantized one
            self.opaque.add(type(tensor).__name__)

    def _add_object(self, value: Any) -> None:
        """By the parts that pickle stores: not by the pickle, which also depends on what is the same object twice."""
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self._mark(name)
        self._objects += 1
        if any(holder is value for holder in self._path):
            return
        # A data set or a generator that samples refer to is in another state when they are read again.
        if isinstance(value, (Dataset, nn.Module)) or is_generator(value) or self._objects > _MOST_OBJECTS:
            self.opaque.add(name)
            return
        self._path.append(value)
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
            parts = (reduced,) if isinstance(reduced, str) else reduced
            self._add_all(list(part) if isinstance(part, Iterator) else part for part in parts)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # what cannot be pickled, or is nested too deep
            self.opaque.add(name)
        finally:
            self._path.pop()
