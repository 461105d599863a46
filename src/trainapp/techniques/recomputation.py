"""What a recomputed block begins with: the state that its forward began with.

Nothing is written back into a tensor: copies take the place of the originals while the block is recomputed, so that
other modules that share a tensor, and gradients that have saved it, never see a write.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainapp.errors import TrainingStopped
from trainapp.rng import generator_state, is_generator, set_generator_state
from trainapp.torch_private import buffers_of, non_persistent_buffers, version_of


class BlockState:
    """The state of a block's modules as its forward finds it: buffers (also those that the forward adds or replaces),
    training flags, other attributes, tensors and generators among them, and Python's and NumPy's global generators.
    Torch's global ones are the business of torch.utils.checkpoint.

    What an attribute contains, such as the items of a list, is not part of it; nor are parameters.
    """

    def __init__(self, block: nn.Module, inputs: tuple[Any, ...]):
        self._block = block
        self._inputs = [(tensor, version_of(tensor)) for tensor in inputs if isinstance(tensor, Tensor)]
        self._held = _Held(list(block.modules()))
        self._versions = {id(tensor): version_of(tensor) for tensor in self._held.tensors()}
        self._copies = {id(tensor): tensor.detach().clone() for tensor in self._held.tensors()}
        self._generators = _Generators([value for value in self._held.values() if is_generator(value)])

    def finish(self) -> None:
        """Use after the forward: frees the copies that are not needed.

        A buffer of the state dict is kept in any case, since a write through `.data` moves no version. Raises
        TrainingStopped for a block that has written to its own input, which a recomputation would then begin with.
        """
        for tensor, version in self._inputs:
            if version_of(tensor) != version:
                raise TrainingStopped(
                    f"activation_checkpointing: the forward of a {type(self._block).__name__} writes in place to a "
                    "tensor that it is called with, so that it cannot be recomputed; write to a copy (a first "
                    "`inplace=True` often does it), or use activation_checkpointing=none"
                )
        self._inputs.clear()
        kept = self._held.persistent()
        for tensor in self._held.tensors():
            if id(tensor) not in kept and version_of(tensor) == self._versions[id(tensor)]:
                self._copies.pop(id(tensor), None)

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """That state inside the block; the present one again after it. Raises TrainingStopped if it is lost."""
        for tensor in self._held.tensors():
            if id(tensor) not in self._copies and version_of(tensor) != self._versions[id(tensor)]:
                raise TrainingStopped(
                    f"activation_checkpointing: a tensor of a {type(self._block).__name__} was written by something "
                    "else between its forward and its backward, so that it cannot be recomputed; register it as a "
                    "buffer of the block, or use activation_checkpointing=none"
                )
        now, generators = _Held(self._held.modules), _Generators(self._generators.own)
        try:
            self._held.put_back({key: copy.clone() for key, copy in self._copies.items()})
            self._generators.put_back()
            yield
        finally:
            now.put_back({})
            generators.put_back()


class _Held:
    """What the attributes and buffers of some modules refer to at one time."""

    def __init__(self, modules: list[nn.Module]):
        self.modules = modules
        self._attributes = [dict(vars(module)) for module in modules]
        self._buffers = [dict(buffers_of(module)) for module in modules]

    def values(self) -> Iterator[Any]:
        for held in (*self._attributes, *self._buffers):
            yield from held.values()

    def tensors(self) -> Iterator[Tensor]:
        """Those with a state of their own: neither parameters nor what is computed from them."""
        return (value for value in self.values() if isinstance(value, Tensor) and not value.requires_grad)

    def persistent(self) -> set[int]:
        """The ids of the buffers that are in the state dict."""
        return {
            id(buffer)
            for module, buffers in zip(self.modules, self._buffers, strict=True)
            for name, buffer in buffers.items()
            if name not in non_persistent_buffers(module)
        }

    def put_back(self, copies: dict[int, Tensor]) -> None:
        """Let the modules refer to the same again, but to `copies` in place of the tensors with these ids."""
        for module, attributes, buffers in zip(self.modules, self._attributes, self._buffers, strict=True):
            for own, held in ((vars(module), attributes), (buffers_of(module), buffers)):
                own.clear()
                own.update({name: copies.get(id(value), value) for name, value in held.items()})


class _Generators:
    """The states of Python's and NumPy's global generators, and of some others."""

    def __init__(self, own: list[Any]):
        self.own = own
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._states = [generator_state(generator) for generator in own]

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in zip(self.own, self._states, strict=True):
            set_generator_state(generator, state)
