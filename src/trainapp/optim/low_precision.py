"""AdamW with states, and if need be parameters, in bf16."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from trainapp.optim.stochastic_rounding import copy_rounded

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Elements that are computed in fp32 at a time, with five temporaries: 5 MiB on the CPU, where they stay in its caches,
# and 80 MiB elsewhere, where each operation has a cost of its own.
PIECES = {"cpu": 1 << 18}
PIECE = 1 << 22
Generators = dict[torch.device, torch.Generator]


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) that computes in fp32 and stores its two moments in `state_dtype`.

    What is stored in bf16 is rounded by chance (`stochastic_rounding`), the parameters too if they are bf16. The chance
    depends on the number of the step alone: a run repeats itself, also after a resume, and all ranks round the same
    values alike. The fused kernels of torch 2.13 are not used: on the CPU they refuse states of another dtype than the
    parameters', and on CUDA they round to nearest (torchtitan, docs/bf16_optimizer_states.md).
    """

    rounds_by_chance = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: Literal["bf16", "fp32"] = "bf16",
    ):
        self._dtype = _DTYPES[state_dtype]
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        generators: Generators = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, generators)
        return loss

    def _update(
        self, parameter: Tensor, group: dict[str, Any], generators: dict[torch.device, torch.Generator]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._dtype)
        state["step"] += 1
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device)
            generators[parameter.device].manual_seed(state["step"])
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        for weight, gradient, mean, square in _pieces([_local(tensor) for tensor in tensors]):
            _adamw(weight, gradient, mean, square, state["step"], group, generators[parameter.device])


def _adamw(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    group: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """In fp32, on copies."""
    beta1, beta2 = group["betas"]
    gradient, new_mean, new_square, new_weight = (
        tensor.to(torch.float32, copy=True) for tensor in (gradient, mean, square, weight)
    )
    new_mean.lerp_(gradient, 1 - beta1)
    new_square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = torch.sqrt(new_square, out=gradient).div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    new_weight.mul_(1 - group["lr"] * group["weight_decay"])
    new_weight.addcdiv_(new_mean, denominator, value=-group["lr"] / (1 - beta1**step))
    for target, source in ((mean, new_mean), (square, new_square), (weight, new_weight)):
        copy_rounded(target, source, generator)


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Views of so many elements, of all tensors alike: temporaries stay small however large a parameter is."""
    if all(t.is_contiguous() for t in tensors):
        size = PIECES.get(tensors[0].device.type, PIECE)
        yield from map(list, zip(*(t.view(-1).split(size) for t in tensors), strict=True))
    else:
        yield tensors


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of an FSDP2 parameter."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
