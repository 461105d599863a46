"""What one call of an operator costs, whatever the device: from shapes alone, so that tensors need no data."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.torch_operators import written_arguments
from trainapp.torch_private import storage_id
from trainapp.tracking.meter import flops_of, is_attention

MATMUL, CONVOLUTION, ATTENTION, FUNCTION = "matmul", "convolution", "attention", "function"
# Compute-bound where the data is in cache: an exponential per element.
_FUNCTIONS = (
    *("silu", "silu_backward", "gelu", "gelu_backward", "exp", "log", "tanh", "sigmoid", "logsumexp", "erf", "pow"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "bernoulli_", "normal_"),
)
# A binary search takes twice as long where branch prediction fails.
_SEARCHES = {"bucketize": 0, "searchsorted": 1}  # the place of the values among the arguments
HOST, LINK = "cpu", "link"  # places: its memory, and between it and a device
_OVERWRITES = frozenset({"zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_"})  # without reading the old


class Shape(NamedTuple):
    """A tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def real(self, device: torch.device) -> Tensor:
        """A tensor of this shape: ones, or zeros of integers, which are valid indices."""
        extent, value = _extent(self.shape, self.stride), int(self.dtype.is_floating_point)
        flat = torch.full((extent,), value, dtype=self.dtype, device=device)
        return flat.as_strided(self.shape, self.stride)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor, with what lies between its own."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if all(shape) else 0


@dataclass(frozen=True)
class Operation:
    """What one call costs, whatever the device. Equal calls are equal.

    signature: the operator, shapes, dtypes and other arguments. work: floating-point operations (FUNCTION: elements).
    moved: bytes read and written. held: bytes of arguments and result while it is run for real: more than it moves
    where an argument is a slice of a larger tensor. allocates: whether its result is new memory. is_view: the result
    is memory of an argument, and nothing is written. place: the type of the device that it runs on, or LINK for a copy
    between host and device. call: runs it for real on a device; None where that is not possible.
    """

    name: str
    signature: str
    kind: str = field(compare=False)
    dtype: torch.dtype = field(compare=False)
    work: int = field(compare=False)
    moved: int = field(compare=False)
    held: int = field(compare=False)
    allocates: bool = field(compare=False)
    is_view: bool = field(compare=False)
    place: str
    call: Callable[[torch.device], Callable[[], Any]] | None = field(compare=False)


Counts = Counter[Operation]


def operation_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation:
    """The cost of one call of an operator, from shapes alone."""
    name = func.overloadpacket.__name__
    inputs, outputs = tensors_in([args, kwargs]), tensors_in([result])
    written = tensors_in([arg for arg, writes in zip(args, written_arguments(func), strict=False) if writes])
    old = {id(tensor) for tensor in inputs}
    new = [tensor for tensor in outputs if id(tensor) not in old]
    strided = _strided(inputs)
    own = {storage_id(tensor.untyped_storage()) for tensor in strided}
    is_view = bool(new) and not written and all(_shares(tensor, own) for tensor in new)  # such as `_unsafe_view`
    read = inputs[1:] if name in _OVERWRITES else inputs
    moved = 0 if is_view else sum(tensor.nbytes for tensor in _strided([*read, *written, *new]))
    held = sum(tensor.nbytes for tensor in _strided(new))
    held += sum(_extent(tensor.shape, tensor.stride()) * tensor.itemsize for tensor in strided)
    work = flops_of(func, args, kwargs, result)
    kind = ATTENTION if is_attention(func) else CONVOLUTION if "convolution" in name else MATMUL
    if name in _FUNCTIONS:
        kind, work = FUNCTION, max((tensor.numel() for tensor in (*inputs, *outputs)), default=0)
    dtype = next((t.dtype for t in (*inputs, *outputs) if t.is_floating_point()), torch.float32)
    call, signature = _call(func, name, args, kwargs)
    places = {tensor.device.type for tensor in (*inputs, *outputs) if tensor.dim()}  # a number may lie anywhere
    place = LINK if len(places) > 1 else next(iter(places), HOST)
    return Operation(name, signature, kind, dtype, work, moved, held, bool(new) and not is_view, is_view, place, call)


def _strided(tensors: list[Tensor]) -> list[Tensor]:
    """Without sparse ones, whose size depends on values: see `nn.Embedding(sparse=True)`."""
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _shares(tensor: Tensor, storages: set[int]) -> bool:
    return tensor.layout is torch.strided and storage_id(tensor.untyped_storage()) in storages


def _call(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    """What runs the operation for real, and its signature."""
    # A storage is no tensor, and would stay in memory with `call`.
    has_storage = any(isinstance(arg, torch.UntypedStorage) for arg in args)
    if has_storage or any(tensor.layout is not torch.strided for tensor in tensors_in([args, kwargs])):
        return None, f"{func} {[tuple(tensor.shape) for tensor in tensors_in([args, kwargs])]}"
    own: Any = (args, {name: value for name, value in kwargs.items() if name != "device"})
    shapes = map_tensors(_shape_of, own)
    has_device = "device" in kwargs  # `call` must not hold on to `kwargs`, whose `out` would stay in memory

    def call(device: torch.device) -> Callable[[], Any]:
        real_args, real_kwargs = _with_tensors(shapes, device)
        if has_device:
            real_kwargs["device"] = device
        if name in _SEARCHES:
            real_args = _scattered(real_args, _SEARCHES[name])
        return functools.partial(func, *real_args, **real_kwargs)

    return (call if func.namespace == "aten" else None), f"{func} {shapes}"


def _scattered(args: tuple[Any, ...], values: int) -> tuple[Any, ...]:
    """The arguments of a search, with values in no order, and ascending limits between them."""
    made: list[Any] = [*args]
    for place, tensor in enumerate(args[:2]):
        if isinstance(tensor, Tensor):
            numbers = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
            ordered = numbers if place == values else numbers.sort(-1).values
            made[place] = ordered.to(tensor)
    return tuple(made)


def _shape_of(tensor: Tensor) -> Any:
    return Shape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _with_tensors(tree: Any, device: torch.device) -> Any:
    """As `map_tensors`, in the other direction."""
    if isinstance(tree, Shape):
        return tree.real(device)
    if isinstance(tree, dict):
        return {name: _with_tensors(value, device) for name, value in tree.items()}
    return type(tree)(_with_tensors(value, device) for value in tree) if type(tree) in (list, tuple) else tree
