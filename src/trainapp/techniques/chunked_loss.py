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
    """Return the sum of the cross-entropy of `head(features)`, and the number of correct predictions.

    Equal to `F.cross_entropy(head(features).float(), targets, reduction="sum")` except for the order of additions: 1e-6
    in fp32. Computes in autocast's dtype inside autocast, otherwise in the weight's, and adds up the loss and the
    weight's gradient in fp32, or in fp64 for a weight in fp64. Not differentiable twice. Does not run hooks of the
    head.

    Args:
        features: [..., width].
        head: the last layer.
        targets: int64 [...].
        rows: number of targets whose logits exist at a time.
        ignored: the target of positions that do not count.
    """
    flat_features = features.flatten(0, -2)
    flat_targets = targets.flatten()
    if rows == "auto":
        rows = auto_rows(len(flat_features), head)

    dtype = head.weight.dtype
    device = features.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return _LinearCrossEntropy.apply(flat_features, head.weight, head.bias, flat_targets, max(1, rows), dtype, ignored)


def auto_rows(count: int, head: nn.Linear) -> int:
    """Return a power of two for which a chunk's logits take about as much memory as all features, as in Liger Kernel.

    At least LEAST_ROWS: each chunk reads the whole weight, which dominates for few rows.
    """
    # As many chunks as a row has times more logits than features. Both divisions round up.
    chunks = max(1, -(-head.out_features // head.in_features))
    rows = -(-max(count, 1) // chunks)
    power_of_two = 1 << (rows - 1).bit_length()
    return max(LEAST_ROWS, power_of_two)


@contextlib.contextmanager
def features_only(model: nn.Module) -> Iterator[Any]:
    """Make calls of the model return its `features()` inside the block. Yields the head, which turns them into logits.

    For models that `require_head` accepts. Goes through the model's forward rather than `features`, so that hooks and
    compilation see a call of the model.
    """
    parts = last_layer(model)
    assert parts is not None, "see require_head"
    features, head = parts

    # The model's own attribute `forward` hides the class's. There may be one already, which is restored.
    attributes = vars(model)
    replaced_forward = attributes.pop("forward", None)
    attributes["forward"] = features
    try:
        yield head
    finally:
        attributes.pop("forward")
        if replaced_forward is not None:
            attributes["forward"] = replaced_forward


def require_head(config: Config, model: nn.Module) -> None:
    """Raise UserError for a model whose last layer this loss cannot replace."""
    name = type(model).__name__
    setting = f"{SETTING}={config.memory.loss_chunk}"
    parts = last_layer(model)
    if parts is None:
        raise UserError(
            f"{setting}: {name} does not separate its last layer; give it a method `features(self, inputs)` and an "
            "nn.Linear `head` with forward(inputs) == head(features(inputs)), or omit the setting"
        )

    # The loss multiplies by the head's weight itself.
    _, head = parts
    has_hooks = has_forward_hooks(head)
    has_own_forward = type(head).forward is not nn.Linear.forward or "forward" in vars(head)
    if has_own_forward or has_hooks:
        hooks = " with hooks" if has_hooks else ""
        raise UserError(
            f"{setting}: the head of {name} must be a plain nn.Linear, but is a {type(head).__name__}{hooks}, which "
            "this loss would not run; make it one (with torch.nn.utils.parametrizations in place of weight_norm and "
            f"spectral_norm; without an adapter, if it has one), or set {SETTING}=null"
        )

    if config.parallel.strategy == "fsdp":
        for block in blocks_of(model, "parallel=fsdp"):
            has_head = any(module is head for module in block.modules())
            if has_head:
                raise UserError(
                    f"{setting}: with parallel=fsdp the head of {name} must not be inside one of its blocks(), outside "
                    "of which only a shard of it exists; take it out of blocks()"
                )


@torch.no_grad()
def require_same_forward(
    model: nn.Module, inputs: Tensor, setting: Any, other_arguments: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Raise UserError for a model whose forward is not `head(features(inputs))`. Buffers and generators are unchanged.

    Args:
        model: the model.
        inputs: the inputs of some samples.
        setting: the value of the setting, for the message.
        other_arguments: the model's other arguments.
    """
    # Compute the logits by the model's forward, and by what the loss in chunks would compute.
    buffers_before = [buffer.clone() for buffer in model.buffers()]
    with preserved_rng(inputs.device):
        output = model(inputs, **other_arguments)
        logits = getattr(output, "logits", output)
    with preserved_rng(inputs.device), features_only(model) as head:
        expected = F.linear(model(inputs, **other_arguments), head.weight, head.bias)  # without hooks, as in the loss
    for buffer, buffer_before in zip(model.buffers(), buffers_before, strict=True):
        buffer.copy_(buffer_before)

    are_equal = isinstance(logits, Tensor) and logits.shape == expected.shape and torch.equal(logits, expected)
    if not are_equal:
        raise UserError(
            f"{SETTING}={setting}: {type(model).__name__}'s forward(inputs) is not head(features(inputs)), which the "
            "loss in chunks computes: something in between scales, caps or drops out, or the head has hooks; "
            "move it into features, or omit the setting"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss and the number of correct predictions, in chunks of `rows` rows; see `linear_cross_entropy`."""

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
        log_sums = []  # the logarithm of each row's sum of exponentials
        with torch.autocast(features.device.type, enabled=False):
            matmul_weight = weight.to(dtype)
            matmul_bias = None if bias is None else bias.to(dtype)
            for chunk, target in zip(features.split(rows), targets.split(rows), strict=True):
                logits = F.linear(chunk.to(dtype), matmul_weight, matmul_bias)
                correct += (logits.argmax(-1) == target).sum()

                # The cross-entropy: the logarithm of the sum of exponentials, minus the target's logit.
                logits = at_least_fp32(logits)
                log_sums.append(logits.logsumexp(-1))
                target_logits = logits.gather(-1, _classes(target, ignored)[:, None]).squeeze(-1)
                loss += (log_sums[-1] - target_logits).masked_fill(target == ignored, 0).sum()

        # The backward recomputes the logits, but not their sums.
        ctx.save_for_backward(features, weight, bias, targets, *log_sums)
        ctx.rows = rows
        ctx.dtype = dtype
        ctx.ignored = ignored
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, targets, *log_sums = ctx.saved_tensors
        dtype = ctx.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)  # bf16 would lose later chunks
        needs_features_gradient, needs_weight_gradient, needs_bias_gradient = ctx.needs_input_grad[:3]
        features_gradient = torch.empty_like(features) if needs_features_gradient else None
        weight_gradient = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight_gradient else None
        bias_gradient = torch.zeros_like(bias, dtype=sum_dtype) if needs_bias_gradient else None
        with torch.autocast(features.device.type, enabled=False):
            matmul_weight = weight.to(dtype)
            matmul_bias = None if bias is None else bias.to(dtype)
            for start, log_sum in zip(range(0, len(targets), ctx.rows), log_sums, strict=True):
                rows = slice(start, start + ctx.rows)
                chunk = features[rows].to(dtype)
                target = targets[rows]

                # The gradient by the logits: probabilities, minus 1 at the target, times the loss's gradient.
                gradient = at_least_fp32(F.linear(chunk, matmul_weight, matmul_bias))
                gradient.sub_(log_sum[:, None]).exp_()
                gradient[torch.arange(len(target), device=target.device), _classes(target, ctx.ignored)] -= 1
                gradient.mul_((scale * (target != ctx.ignored))[:, None])
                gradient = gradient.to(dtype)

                # From it, those by the layer's input and parameters.
                if features_gradient is not None:
                    features_gradient[rows] = gradient @ matmul_weight
                if weight_gradient is not None and dtype == sum_dtype:
                    weight_gradient.addmm_(gradient.T, chunk)
                elif weight_gradient is not None:
                    weight_gradient += gradient.T @ chunk
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0, dtype=sum_dtype)
        gradients = (features_gradient, _in_dtype_of(weight, weight_gradient), _in_dtype_of(bias, bias_gradient))
        return (*gradients, None, None, None, None)  # targets, rows, dtype and ignored have none


def _classes(targets: Tensor, ignored: int) -> Tensor:
    """Return the targets, with class 0 where they are ignored.

    Indexing fails for other targets that are no class, on CUDA by an assert on the device, as in `F.cross_entropy`.
    """
    return targets.masked_fill(targets == ignored, 0)


def _in_dtype_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or parameter is None:
        return gradient
    return gradient.to(parameter.dtype)
