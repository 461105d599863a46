"""Operations whose results have shapes that depend on values: `nonzero`, boolean indices, `unique` and their like.

How many elements are selected is assumed, once as the most and once as the fewest that are possible. Masks that come
from a router's choice (`topk`, then `==` a number or `one_hot`) cannot all select everything: each row chooses k
classes of n. Either all rows choose the same ones, or all classes get equal parts. That holds only where the classes
are experts that are alike: of others, each may be the one that all rows choose, and any mask may select everything.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from trainapp.torch_operators import UNIQUE
from trainapp.torch_private import parameters_of

_aten = torch.ops.aten


class Share(enum.Enum):
    """How much a mask selects, and whom a router chooses."""

    MOST = "everything, or the first classes"
    LAST = "everything, or the last classes"
    FEWEST = "nothing, or equal parts of all classes"


@dataclass(frozen=True)
class _Choice:
    """Of each row, `chosen` different ones of `classes`: the numbers in a tensor, or true elements of a mask.

    share: the mask's true elements if all classes get equal parts. only: the class that the mask is of.
    """

    chosen: int
    classes: int
    share: float = 0.0
    most: float = 0.0
    only: int | None = None


class AssumedShapes:
    """Answers operations in `handles`, and follows choices through the operations between a router and its masks.

    Attributes: `operations`, the names of those that were answered; `alike`, how many experts the model has of each
    kind, see `experts_alike`.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.operations: set[str] = set()
        self.alike: frozenset[int] = frozenset()
        self._choices = WeakTensorKeyDictionary()
        self._numbered = WeakTensorKeyDictionary()  # results of `arange(n)`, which `one_hot` compares with

    def handles(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the result's shape depends on values."""
        if func in _INDEXED:
            return any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1])
        if func is _aten.bincount.default:
            return len(args) > 2 and args[2] > 0  # else nothing says how long the result is
        return func in _RESULTS

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation returns, with the assumed number of elements."""
        self.operations.add(str(func).removesuffix(".default"))
        if func in _INDEXED:
            indices: list[Tensor | None] = []
            for index in args[1]:
                if isinstance(index, Tensor) and index.dtype in _MASKS:
                    indices += index.new_empty((index.ndim, self.selected(index)), dtype=torch.long).unbind(0)
                else:
                    indices.append(index)
            return func(args[0], indices, *args[2:], **kwargs)
        return _RESULTS[func](self, *args, **kwargs)

    def selected(self, mask: Tensor) -> int:
        """How many elements of a mask are true."""
        choice = self._choices.get(mask)
        if choice is None or (choice.only is not None and choice.classes not in self.alike):
            return 0 if self.share is Share.FEWEST else mask.numel()
        if self.share is Share.FEWEST or choice.only is None:
            return round(choice.share * mask.numel())
        first = choice.only < choice.chosen
        last = choice.only >= choice.classes - choice.chosen
        return round(choice.most * mask.numel()) if (first if self.share is Share.MOST else last) else 0

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what the results of an operation say of a router's choice."""
        if func is _aten.arange.default:
            self._numbered[result] = args[0]
            return
        if func._schema.is_mutable and func not in _SCATTERS:
            for known in (self._choices, self._numbered):
                if args and isinstance(args[0], Tensor) and args[0] in known:
                    del known[args[0]]
            return
        if func in _CHOOSES:
            chosen = result if isinstance(result, Tensor) else result[1]
            scores: Tensor = args[0]
            dim = _dimension(func, args, scores)
            if dim is not None and scores.ndim and chosen.dtype == torch.long:
                count = chosen.shape[dim] if chosen.ndim == scores.ndim else 1
                self._choices[chosen] = _Choice(count, scores.shape[dim])
            return
        if func in _SCATTERS and isinstance(args[2], Tensor) and (choice := self._choices.get(args[2])) is not None:
            into, width = result, args[0].shape[args[1]]
            if into.numel() and not choice.share:
                share = args[2].numel() / into.numel()
                self._choices[into] = _Choice(choice.chosen, width, share, width * share / choice.chosen)
            return
        if not (args and isinstance(args[0], Tensor)) or (choice := self._choices.get(args[0])) is None:
            return
        if func in _COMPARES and not choice.share:
            number = args[1] if type(args[1]) is int else None
            if number is not None or self._is_every_class(args[0], args[1], choice.classes):
                self._choices[result] = _Choice(
                    choice.chosen, choice.classes, 1 / choice.classes, 1 / choice.chosen, number
                )
        elif func in _PASSES_ON or (func in _NOT_ZERO and choice.share and args[1] == 0):
            self._pass_on(func, args, choice, result)

    def _is_every_class(self, choice: Tensor, other: Any, classes: int) -> bool:
        """Whether each choice is compared with each class, as `one_hot` does."""
        is_numbered = isinstance(other, Tensor) and self._numbered.get(other, 0) >= classes
        return is_numbered and choice.ndim > 0 and choice.shape[-1] == 1

    def _pass_on(self, func: Any, args: tuple[Any, ...], choice: _Choice, result: Any) -> None:
        results = [result] if isinstance(result, Tensor) else list(result)
        source: Tensor = args[0]
        picks = choice.share and choice.only is None and func in _PICKS
        dimensions = list(source.shape).count(choice.classes)  # 0 with a class more, for padding, as in Mixtral
        if picks and (dimensions > 1 or (dimensions == 0 and choice.classes not in self.alike)):
            return  # which dimension is that of the classes?
        for number, each in enumerate(results):
            only = choice.only
            if picks and source.shape[args[1] if len(args) > 1 else 0] == choice.classes:
                only = args[2] % choice.classes if func is _aten.select.int else number
            share, most = choice.share, choice.most
            if func in _REDUCES and each.numel():
                factor = source.numel() / each.numel()
                share, most = min(1.0, factor * share), min(1.0, factor * most)
            self._choices[each] = _Choice(choice.chosen, choice.classes, share, most, only)

    # Results of the operations, in the order of their signatures.

    def _nonzero(self, mask: Tensor) -> Tensor:
        return mask.new_empty((self.selected(mask), mask.ndim), dtype=torch.long)

    def _masked_select(self, source: Tensor, mask: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(source.shape, mask.shape)
        share = self.selected(mask) / max(1, mask.numel())
        return source.new_empty(round(share * shape.numel()))

    def _unique(self, source: Tensor, *_: Any, inverse: bool = False, counts: bool = False) -> tuple[Tensor, ...]:
        number = min(1, source.numel()) if self.share is Share.FEWEST else source.numel()
        places = source.new_empty(source.shape if inverse else 0, dtype=torch.long)
        return source.new_empty(number), places, source.new_empty(number if counts else 0, dtype=torch.long)

    def _unique_values(
        self, source: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
    ) -> tuple[Tensor, ...]:
        return self._unique(source, inverse=return_inverse, counts=return_counts)

    def _unique_consecutive(
        self, source: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> tuple[Tensor, ...]:
        if dim is not None:
            return self._unique_dim(source, dim, True, return_inverse, return_counts)
        return self._unique(source, inverse=return_inverse, counts=return_counts)

    def _unique_dim(
        self,
        source: Tensor,
        dim: int,
        sorted: bool = True,
        return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[Tensor, ...]:
        shape = list(source.shape)
        whole = shape[dim]
        shape[dim] = min(1, whole) if self.share is Share.FEWEST else whole
        places = source.new_empty(whole if return_inverse else 0, dtype=torch.long)
        return source.new_empty(shape), places, source.new_empty(shape[dim] if return_counts else 0, dtype=torch.long)

    def _bincount(self, source: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """As long as `minlength` says: it is longer only where a value exceeds that."""
        dtype = torch.long
        if weights is not None:
            dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return source.new_empty(minlength, dtype=dtype)


_MASKS = (torch.bool, torch.uint8)
_INDEXED = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
_RESULTS: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: AssumedShapes._nonzero,
    _aten.masked_select.default: AssumedShapes._masked_select,
    UNIQUE: AssumedShapes._unique_values,
    _aten.unique_dim.default: AssumedShapes._unique_dim,
    _aten.unique_consecutive.default: AssumedShapes._unique_consecutive,
    _aten.bincount.default: AssumedShapes._bincount,
}
_CHOOSES = frozenset({_aten.topk.default, _aten.argmax.default, _aten.max.dim, _aten.argmin.default, _aten.min.dim})
_COMPARES = frozenset({_aten.eq.Scalar, _aten.eq.Tensor})
_SCATTERS = frozenset({_aten.scatter_.value, _aten.scatter.value})
_PICKS = frozenset({_aten.select.int, _aten.unbind.int})
_REDUCES = frozenset({_aten.any.dim, _aten.any.dims, _aten.sum.dim_IntList, _aten.amax.default})
_PASSES_ON = frozenset({
    *_PICKS, *_REDUCES, _aten.view.default, _aten.permute.default, _aten.transpose.int, _aten.t.default,
    _aten.squeeze.default, _aten.squeeze.dim, _aten.unsqueeze.default, _aten.clone.default, _aten.detach.default,
    _aten._to_copy.default, _aten._unsafe_view.default, _aten.alias.default, _aten.reshape.default,
    _aten.expand.default,
})  # fmt: skip
_NOT_ZERO = frozenset({_aten.gt.Scalar, _aten.ne.Scalar})  # of a mask, they are the mask


def experts_alike(model: nn.Module) -> frozenset[int]:
    """How many there are where a model has alike parts: lists of modules with parameters of the same shapes, and
    parameters that a module of its own stacks as matrices.
    """
    found = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len({_shapes(part) for part in module}) == 1:
            found.add(len(module))
        if not type(module).__module__.startswith("torch.nn."):
            own = (parameter for parameter in parameters_of(module).values() if parameter is not None)
            found |= {parameter.shape[0] for parameter in own if parameter.ndim == 3}
    return frozenset(found)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    kinds = tuple(type(part) for part in module.modules())
    return kinds, tuple(parameter.shape for parameter in module.parameters())


def _dimension(func: Any, args: tuple[Any, ...], scores: Tensor) -> int | None:
    """Over which dimension a class is chosen; None for all at once."""
    position = 2 if func is _aten.topk.default else 1
    dim = args[position] if len(args) > position else (-1 if func is _aten.topk.default else None)
    return None if dim is None or not scores.ndim else dim % scores.ndim
