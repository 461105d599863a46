"""What mutable values other than tensors hold: taken before a forward, and put back in place for its recomputation.

In place, so that all that refers to a value sees it: other blocks, bound methods, the closures of hooks, the caller of
the block.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainapp.techniques.content_kinds import ARRAY, addresses_of, kind_of
from trainapp.techniques.kind import PLAIN, Kind, put_nothing

DEPTH = 100  # attributes of items of attributes
MOST_VALUES = 100_000
SMALL = 64  # items: a container of so few is cheaper to copy than to be wrong about
Path = tuple[Any, ...]  # the steps to a value; one to any item, since a forward may change another in each call


class Known:
    """What the forwards so far have shown about the values at each path."""

    def __init__(self) -> None:
        self.constant: set[Path] = set()
        self.written: set[Path] = set()


class Contents:
    """The contents of values before one forward.

    Small lists, dictionaries and the like, and generators, are taken in every forward; other values in the first one
    that meets them, and from then on only if it has changed them, or something in them.
    """

    left_out: Path | None = None  # the first value that is too many, or too deep

    def __init__(self) -> None:
        self._taken: dict[int, tuple[Any, Kind, Any, Path]] = {}

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, value: Any, path: Path, known: Known) -> None:
        """Take the contents of a value and of all in it; of a module, what is in its slots. Check `left_out` then."""
        own: type = type(value)
        kind = kind_of(own)
        if kind is None or id(value) in self._taken or self.left_out:
            return
        is_small = kind.is_container and len(value) <= SMALL
        if path in known.constant and not (is_small or kind.always):
            return
        if own is tuple and all(type(part) in PLAIN for part in value):  # common: a shape, a kernel's size
            return
        if len(self._taken) >= MOST_VALUES or len(path) > DEPTH:
            self.left_out = path
            return
        content = kind.take(value)
        self._taken[id(value)] = (value, kind, content, path)
        if kind.always:
            known.written.update(path[:end] for end in range(1, len(path) + 1))
            known.constant -= known.written
        for step, part in kind.parts(content):
            if type(part) not in PLAIN:
                self.take(part, (*path, step), known)

    def arrays(self) -> list[range]:
        """The addresses of the memory of NumPy arrays among them."""
        return [addresses_of(value) for value, kind, *_ in self._taken.values() if kind is ARRAY]

    def judge(self, known: Known) -> list[tuple[Path, Any]]:
        """Compare with the contents after the forward. Returns the values that have changed and cannot be put back."""
        lost = []
        for value, kind, content, path in self._taken.values():
            if (kind.put is None or path not in known.written) and not kind.same(content, kind.take(value)):
                known.written.update(path[:end] for end in range(1, len(path) + 1))
                if kind.put is None:
                    lost.append((path, value))
        known.constant |= {path for *_, path in self._taken.values()}
        known.constant -= known.written
        self._taken = {
            key: taken
            for key, taken in self._taken.items()
            if taken[1].put not in (None, put_nothing) and (taken[1].is_container or taken[3] in known.written)
        }
        return lost

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """These contents inside the block, in place; the present ones again after it."""
        now = [(value, kind, kind.take(value)) for value, kind, _, _ in self._taken.values()]
        try:
            for (value, kind, content, _), (_, _, current) in zip(self._taken.values(), now, strict=True):
                if kind.put is not None and not kind.same(content, current):
                    kind.put(value, content)
            yield
        finally:
            for value, kind, current in now:
                if kind.put is not None and not kind.same(current, kind.take(value)):
                    kind.put(value, current)
