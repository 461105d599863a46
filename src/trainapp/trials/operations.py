"""Operations of a trial call: watched, or computed with other rounding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainapp.data.batch import tensors_in
from trainapp.draws.sample_draws import SampleDraws
from trainapp.state.stateful import is_expanded
from trainapp.torch_private import DispatchMode, draws_numbers, graph_task, storage_id

_ROUNDED_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})  # torch multiplies no fp8


class Summands(NamedTuple):
    """What was added up to a sum."""

    number: int = 0  # of elements; 0 if unknown
    are_integers: bool = False  # whether they are booleans or integers, or were cast from them: they have no weights


class Observer(DispatchMode):
    """A watch over the operations inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False  # whether any operation draws random numbers, from whatever generator
        self.computes_gradients = False  # whether the task itself runs a backward, as by torch.autograd.grad
        # The relative rounding error of the coarsest floating-point dtype in results, of metrics too; 0 without any.
        self.epsilon = 0.0
        self.epsilon_of_arrays = 0.0  # the same of results with several elements: a solver's step size is a scalar
        self.epsilon_of_loss = 0.0  # `epsilon` before the metrics were computed
        self.writes: list[str] = []  # what the call has changed of the model's or the task's state
        self.summands_of_metrics: dict[str, Summands] = {}  # by name
        # Sums and their summands, and casts of integers, by id: with the tensors, so that no other one gets the id.
        self._sums: dict[int, tuple[Tensor, Summands]] = {}
        self._casts_of_integers: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws = self.draws or draws_numbers(func, args, kwargs or {})
        self.computes_gradients = self.computes_gradients or graph_task() != -1
        for tensor in tensors_in(result):
            if tensor.is_floating_point() or tensor.is_complex():
                epsilon = torch.finfo(tensor.dtype).eps
                self.epsilon = max(self.epsilon, epsilon)
                if tensor.numel() > 1:
                    self.epsilon_of_arrays = max(self.epsilon_of_arrays, epsilon)

        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            self._record_sum(func, args[0], result)
        return result

    def _record_sum(self, func: Any, argument: Tensor, result: Tensor) -> None:
        """Record what a sum adds up, also where the sum is cast, and casts of integers, such as of `equal.float()`."""
        is_sum = func.overloadpacket is torch.ops.aten.sum
        is_cast_of_sum = result.ndim == argument.ndim == 0
        if is_sum or is_cast_of_sum:
            summands = self.summands_of(argument)
            if not summands.number:
                summands = Summands(argument.numel(), self._has_integers(argument))
            self._sums[id(result)] = (result, summands)
        elif func.overloadpacket is torch.ops.aten._to_copy and self._has_integers(argument):
            self._casts_of_integers[id(result)] = result

    def _has_integers(self, tensor: Tensor) -> bool:
        """Return whether the elements are booleans or integers, or were cast from them."""
        is_inexact = tensor.is_floating_point() or tensor.is_complex()
        return not is_inexact or id(tensor) in self._casts_of_integers

    def summands_of(self, tensor: Tensor) -> Summands:
        """Return the elements that were added up to this sum; none if it is no sum, or was not seen."""
        _, summands = self._sums.get(id(tensor), (None, Summands()))
        return summands


class RandomRounding(DispatchMode):
    """A mode that perturbs each new floating-point result by one rounding error, at random: one epsilon of its dtype,
    of fp32 at least. The change of the outcome shows how far rounding may take it, whatever cancels out or is compared
    in between (Parker 1997, Monte Carlo arithmetic). Integers, such as masks and counts, are exact.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        # Without numbers that are rounded already, such as in a mask or in `zeros`, the result is exact.
        arguments = [tensor for tensor in tensors_in([list(args), kwargs]) if _has_own_storage(tensor)]
        if not any(tensor.is_floating_point() for tensor in arguments):
            return result

        # Round what is new: not a view, and not written in place, which would round its other values, too.
        argument_storages = {storage_id(tensor.untyped_storage()) for tensor in arguments}
        for tensor in tensors_in(result):
            if not _has_own_storage(tensor):
                continue
            is_new = storage_id(tensor.untyped_storage()) not in argument_storages
            if is_new and tensor.dtype in _ROUNDED_DTYPES and not is_expanded(tensor):
                self._round(tensor)
        return result

    def _round(self, tensor: Tensor) -> None:
        epsilon = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)

        # Up or down, at random. Suspended, as these numbers are not the samples'.
        with SampleDraws.suspended():
            options: dict[str, Any] = {"device": tensor.device, "generator": self._generator, "dtype": torch.int8}
            bits = torch.randint(0, 2, tensor.shape, **options)
        signs = (2 * bits - 1).to(tensor.dtype)

        # Leave integers as they are. Larger numbers have no fractions, but may have been rounded.
        is_integer = tensor == tensor.round()
        is_exact = is_integer & (tensor.abs() < 0.25 / epsilon)
        signs.masked_fill_(is_exact, 0)
        tensor.mul_(1 + epsilon * signs)


def _has_own_storage(tensor: Tensor) -> bool:
    """Return whether the tensor has one storage of its own kind: it is not sparse, nested or of another subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
