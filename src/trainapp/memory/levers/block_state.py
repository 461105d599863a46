"""What the forward of a block changes besides its outputs, so that the block can be run a second time without a trace.

A recomputation must start from the state that the first forward started from (a block may compute with a running
statistic that it then updates) and leave the state that it finds. Nothing is written back into a tensor: copies take
the place of the originals while the block is recomputed, so that other modules that share a tensor, and gradients that
have saved it, never see a write.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.errors import TrainingStopped, UserError
from trainapp.memory.levers.content_kinds import PLAIN, kind_of, written_to
from trainapp.memory.levers.contents import Contents, Known, Path
from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.optim.updated_memory import UpdatedMemory
from trainapp.rng import HostGenerators
from trainapp.torch_private import buffers_of, is_tracing, non_persistent_buffers, parameters_of, version_of

_ABSENT = object()
_ARGUMENT = -1  # in the place of a dictionary's number
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# The searches and restarts after an error know memory and devices by their words.
_OF_DEVICES = re.compile(r"memory|alloc|mmap|driver|CUDA|cuDNN|cuBLAS|CUSOLVER|CUFFT|HIP|MIOPEN|[NR]CCL|XPU|MPS", re.I)
Place = tuple[int, str]  # of a tensor: the dictionary that holds it, by its number in the block, and its name


class BlockState:
    """The state that a block's forward may change.

    Covered: buffers, parameters, tensors and generators that are attributes of its modules, Python's and NumPy's global
    generators, numbers and the like, and all `Contents` of other attributes, of hooks and of the block's arguments. A
    change of anything else that is reached on the way, such as of a tensor in a list, is refused when the first
    forward makes it. Torch's global generators are the business of torch.utils.checkpoint.

    Buffers are copied in every forward, and the copies of those outside the state dict (rotary tables, masks) dropped
    after it if nothing has moved their version. Parameters and other tensors are copied in the first forward only, to
    see which of them the forward writes; from then on only those.
    """

    def __init__(self, block: nn.Module, mode: str):
        self.block, self.mode = block, mode
        self._known = Known()
        self._written: set[Place] = set()
        self._is_known = self._is_traced = False

    def take_arguments(self, before: "Before", inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Take what the block is called with. Call before the forward."""
        for name, value in (*enumerate(inputs), *options.items()):
            if isinstance(value, Tensor):
                before.inputs.append((name, value, written_to(value)))
            else:
                before.contents.take(value, ((_ARGUMENT, name),), self._known)

    @contextlib.contextmanager
    def noted(self, before: "Before") -> Iterator[None]:
        """Use around the forward. Fills `before`."""
        self._take(before)
        yield
        self._drop_unwritten(before)

    def _take(self, before: "Before") -> None:
        before.generators = HostGenerators()
        # A trace compares no values, but counts the copies that the first real forward makes.
        copies_all = not (self._is_traced if is_tracing() else self._is_known)
        for module in self.block.modules():
            buffers, attributes, constant = buffers_of(module), vars(module), non_persistent_buffers(module)
            for owner in (parameters_of(module), buffers, attributes):
                place = len(before.owners)
                own = attributes.keys() - MODULE_ATTRIBUTES if owner is attributes else owner
                found: dict[str, Any] = {name: owner[name] for name in own}
                before.owners.append((owner, found))
                for name, value in found.items():
                    if isinstance(value, Tensor):
                        before.versions[place, name] = version_of(value)
                        if owner is buffers or copies_all or (place, name) in self._written:
                            before.copies[place, name] = _copy(value)
                        if owner is not buffers or name in constant:
                            before.droppable.add((place, name))
                    elif type(value) not in PLAIN:
                        before.contents.take(value, ((place, name),), self._known)
            kind: type = type(module)
            if kind_of(kind) is not None:  # it has slots
                before.contents.take(module, ((place, ""),), self._known)
            for hooks in _HOOKS:
                for hook in attributes[hooks].values():
                    before.contents.take(hook, ((place, "hook"),), self._known)

    def _drop_unwritten(self, before: "Before") -> None:
        """Drop the copies of tensors that this forward has not written."""
        for place, name in before.droppable & before.copies.keys() - self._written:
            tensor = before.owners[place][1][name]
            moved = version_of(tensor) != before.versions[place, name]
            if moved or not (self._is_known or is_tracing() or _equal(tensor, before.copies[place, name])):
                self._written.add((place, name))
            else:
                del before.copies[place, name]
        before.droppable.clear()
        inputs, before.inputs = before.inputs, []
        if is_tracing():
            self._is_traced = True
            return
        self._is_known = True
        lost = [(((_ARGUMENT, name),), tensor) for name, tensor, count in inputs if written_to(tensor) != count]
        if lost := lost + before.contents.judge(self._known):
            own = {id(value) for _, found in before.owners for value in found.values()}  # they are copied
            for path, value in lost:
                if not isinstance(value, Tensor) or id(value) not in own:
                    self._refuse(path, value)

    @contextlib.contextmanager
    def rewound(self, before: "Before") -> Iterator[None]:
        """Use around the recomputation: the state of `before`, and after it that of now.

        Raises TrainingStopped if a tensor of that state is gone.
        """
        now: list[tuple[dict[str, Any], str, Any]] = []
        copies: dict[int, Any] = {}  # of an original that is shared: one
        for place, (owner, found) in enumerate(before.owners):
            if not found and (not owner or owner.keys() <= MODULE_ATTRIBUTES):
                continue
            for name in (found.keys() | owner.keys()) - MODULE_ATTRIBUTES:
                original, current = found.get(name, _ABSENT), owner.get(name, _ABSENT)
                kept = before.copies.get((place, name), _ABSENT)
                if kept is not _ABSENT:
                    original = copies.setdefault(id(original), _copy(kept))
                elif isinstance(original, Tensor) and version_of(original) != before.versions[place, name]:
                    self._require_updated(original, name)
                if original is not current:
                    now.append((owner, name, current))
                    _put(owner, name, original)
        try:
            with (
                before.contents.rewound() if before.contents else contextlib.nullcontext(),
                before.generators.rewound(),
            ):
                yield
        except Exception as error:
            if not _is_of_the_block(error):
                raise
            raise RuntimeError(
                f"activation_checkpointing={self.mode}: the recomputation of a {type(self.block).__name__} failed with "
                f"the error above, where its forward had not ({type(error).__name__}: {error}); the block depends on "
                "something that has changed since, or on being run only once: use activation_checkpointing=none"
            ) from error
        finally:
            for owner, name, current in now:
                _put(owner, name, current)

    def _refuse(self, path: Path, value: Any) -> None:
        """Raises TrainingStopped for a value that the forward has changed, and that cannot be put back."""
        (place, name), *steps = path
        where = f"argument {name}" if place == _ARGUMENT else f"`{name}{''.join(steps)}`"
        held = f", a {type(value).__module__}.{type(value).__qualname__},"
        raise TrainingStopped(
            f"activation_checkpointing={self.mode}: {where} of a {type(self.block).__name__}{held} is changed by its "
            "forward, and what it held before is lost, so that the block cannot be recomputed; keep it in a buffer, a "
            "number, a list or a dictionary of the block (a tensor that it is called with: write to a copy), or use "
            "activation_checkpointing=none"
        )

    def _require_updated(self, tensor: Tensor, name: str) -> None:
        """Raises TrainingStopped for a tensor that something else than the backward's own updates has written."""
        if UpdatedMemory.watches(tensor):
            return
        raise TrainingStopped(
            f"activation_checkpointing: `{name}` in a {type(self.block).__name__} is written in some forwards only, or "
            "by another module, and what it held before is lost, so that the block cannot be recomputed; register it "
            "as a buffer of the block, or use activation_checkpointing=none"
        )


class Before:
    """The state before one forward."""

    def __init__(self) -> None:
        self.owners: list[tuple[dict[str, Any], dict[str, Any]]] = []  # dictionaries of the modules, and what they held
        self.copies: dict[Place, Any] = {}
        self.versions: dict[Place, int] = {}
        self.droppable: set[Place] = set()
        self.contents = Contents()
        self.inputs: list[tuple[Any, Tensor, int]] = []  # until the forward has ended
        self.generators: HostGenerators


def _put(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value


def _is_of_the_block(error: Exception) -> bool:
    """Whether the block's own code has failed, and not memory or a device, nor is it how torch ends a recomputation."""
    if isinstance(error, (UserError, torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, OSError)):
        return False
    return type(error).__module__ != "torch.utils.checkpoint" and not _OF_DEVICES.search(str(error))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether bits are equal; NaN counts as different. Waits for the device."""
    return a.layout is not torch.strided or torch.equal(a, b)
