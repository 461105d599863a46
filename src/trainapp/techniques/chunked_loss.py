"""Cross-entropy without all logits: only those of some rows exist at a time, in the forward and again in the backward.

The logits of a language model are often its largest activation: [tokens, vocabulary], in fp32 for the loss, and as much
for their gradient. Here the last layer and the loss are one operation, which computes the logits of a chunk of rows,
adds up the loss, and drops them; the backward recomputes them. This costs one more matmul with the last layer's weight.
The method is that of Liger Kernel (arXiv:2410.10989) and Cut Cross-Entropy (arXiv:2411.09009).

Torch 2.13's `F.linear_cross_entropy` (torch/nn/modules/linear_cross_entropy.py) is not used: it computes the gradients
in the forward, before fp16's loss scale is known, rounds the loss of bf16 inputs to bf16, and does not allow counting
correct predictions; and trainapp also supports 2.11, which lacks it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.models.inspect import blocks_of, last_layer
from trainapp.optim.precision import at_least_fp32
from trainapp.rng import preserved_rng
from trainapp.torch_private import has_forward_hooks

SETTING = "memory.loss_chunk"
LEAST_ROWS = 128


def linear_cross_entropy(
    features: Tensor, head: nn.Linear, targets: Tensor, rows: int | Literal["auto"] = "auto", ignored: int = -100
) -> tuple[Tensor, Tensor]:
    """`(loss, correct)`: the sum of the cross-entropy of `head(features)`, and the number of correct predictions.

    features: [..., width]; targets: int64 [...], `ignored` for ignored positions. rows: number of targets whose logits
    exist at a time. Equal to `F.cross_entropy(head(features).float(), targets, reduction="sum")` except for the order
    of additions: 1e-6 in fp32. Computes in autocast's dtype inside autocast, otherwise in the weight's, and adds up the
    loss and the weight's gradient in fp32, or in fp64 for a weight in fp64. Not differentiable twice. Does not run
    hooks of the head.
    """
    flat, flat_targets = features.flatten(0, -2), targets.flatten()
    if rows == "auto":
        rows = auto_rows(len(flat), head)
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    return _LinearCrossEntropy.apply(flat, head.weight, head.bias, flat_targets, max(1, rows), dtype, ignored)


def auto_rows(count: int, head: nn.Linear) -> int:
    """A power of two for which a chunk's logits take about as much memory as all features, as in Liger Kernel.

    At least LEAST_ROWS: each chunk reads the whole weight, which dominates for few rows.
    """
    chunks = max(1, -(-head.out_features // head.in_features))
    return max(LEAST_ROWS, 1 << (-(-max(count, 1) // chunks) - 1).bit_length())


@contextlib.contextmanager
def features_only(model: nn.Module) -> Iterator[Any]:
    """Inside the block, calling the model returns its `features()`, which the yielded head turns into logits. For
    models that `require_head` accepts.

    Goes through the model's forward rather than `features`, so that hooks and compilation see a call of the model.
    """
    parts = last_layer(model)
    assert parts is not None, "see require_head"
    attributes = vars(model)
    own = attributes.pop("forward", None)
    attributes["forward"], head = parts
    try:
        yield head
    finally:
        attributes.pop("forward")
        if own is not None:
            attributes["forward"] = own


def require_head(config: Config, model: nn.Module) -> None:
    """Raises UserError for a model whose last layer this loss cannot replace."""
    name, setting = type(model).__name__, f"{SETTING}={config.memory.loss_chunk}"
    parts = last_layer(model)
    if parts is None:
        raise UserError(
            f"{setting}: {name} does not separate its last layer; give it a method `features(self, inputs)` and an "
            "nn.Linear `head` with forward(inputs) == head(features(inputs)), or omit the setting"
        )
    _, head = parts
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head) or has_forward_hooks(head):
        hooks = " with hooks" if has_forward_hooks(head) else ""
        raise UserError(
            f"{setting}: the head of {name} must be a plain nn.Linear, but is a {type(head).__name__}{hooks}, which "
            "this loss would not run; make it one (with torch.nn.utils.parametrizations in place of weight_norm and "
            f"spectral_norm; without an adapter, if it has one), or set {SETTING}=null"
        )
    if config.parallel.strategy == "fsdp":
        inside = (m for block in blocks_of(model, "parallel=fsdp") for m in block.modules())
        if any(m is head for m in inside):
            raise UserError(
                f"{setting}: with parallel=fsdp the head of {name} must not be inside one of its blocks(), outside of "
                "which only a shard of it exists; take it out of blocks()"
            )


@torch.no_grad()
def require_same_forward(
    model: nn.Module, inputs: Tensor, setting: Any, others: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Raises UserError for a model whose forward is not `head(features(inputs))`.

    inputs: inputs of some samples; others: the model's other arguments. Buffers and generators are unchanged.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    with preserved_rng(inputs.device):
        output = model(inputs, **others)
        logits = getattr(output, "logits", output)
    with preserved_rng(inputs.device), features_only(model) as head:
        expected = F.linear(model(inputs, **others), head.weight, head.bias)  # without hooks, as in the loss
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    if not (isinstance(logits, Tensor) and logits.shape == expected.shape and torch.equal(logits, expected)):
        raise UserError(
            f"{SETTING}={setting}: {type(model).__name__}'s forward(inputs) is not head(features(inputs)), which the "
            "loss in chunks computes: something in between scales, caps or drops out, or the head has hooks; "
            "move it into features, or omit the setting"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: int,
        dtype: torch.dtype,
        ignored: int,
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), device=features.device, dtype=torch.promote_types(dtype, torch.float32))
        correct = torch.zeros((), dtype=torch.int64, device=features.device)
        sums = []  # the logarithm of each row's sum of exponentials
        with torch.autocast(features.device.type, enabled=False):
            product, own = weight.to(dtype), None if bias is None else bias.to(dtype)
            for x, target in zip(features.split(rows), targets.split(rows), strict=True):
                logits = F.linear(x.to(dtype), product, own)
                correct += (logits.argmax(-1) == target).sum()
                logits = at_least_fp32(logits)
                sums.append(logits.logsumexp(-1))
                chosen = logits.gather(-1, _classes(target, ignored)[:, None]).squeeze(-1)
                loss += (sums[-1] - chosen).masked_fill(target == ignored, 0).sum()
        ctx.save_for_backward(features, weight, bias, targets, *sums)
        ctx.rows, ctx.dtype, ctx.ignored = rows, dtype, ignored
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, targets, *sums = ctx.saved_tensors
        dtype, total = ctx.dtype, torch.promote_types(ctx.dtype, torch.float32)  # bf16 would lose later chunks
        by_features = torch.empty_like(features) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=total) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias, dtype=total) if ctx.needs_input_grad[2] else None
        with torch.autocast(features.device.type, enabled=False):
            product, own = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start, log_sum in zip(range(0, len(targets), ctx.rows), sums, strict=True):
                here = slice(start, start + ctx.rows)
                x, target = features[here].to(dtype), targets[here]
                gradient = at_least_fp32(F.linear(x, product, own))
                gradient.sub_(log_sum[:, None]).exp_()  # the probabilities
                gradient[torch.arange(len(target), device=target.device), _classes(target, ctx.ignored)] -= 1
                gradient.mul_((scale * (target != ctx.ignored))[:, None])
                gradient = gradient.to(dtype)
                if by_features is not None:
                    by_features[here] = gradient @ product
                if by_weight is not None and dtype == total:
                    by_weight.addmm_(gradient.T, x)
                elif by_weight is not None:
                    by_weight += gradient.T @ x
                if by_bias is not None:
                    by_bias += gradient.sum(0, dtype=total)
        grads = (by_features, _like(by_weight, weight), _like(by_bias, bias))
        return (*grads, None, None, None, None)


def _classes(targets: Tensor, ignored: int) -> Tensor:
    """Class 0 where a target is ignored. Indexing fails for other targets that are no class, on CUDA by an assert
    on the device, as in `F.cross_entropy`."""
    return targets.masked_fill(targets == ignored, 0)


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or parameter is None else gradient.to(parameter.dtype)
