"""What a technique saves at most of what filled memory: estimates by the model's sizes, without a plan.

The functions `by_...` are `Technique.estimate` of techniques that do not save a fixed share of the categories they
relieve. Their arguments: the configuration, the one with the technique, the model of the first, and what filled memory.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.memory.live_tensors import Category
from trainapp.memory.static import size_of
from trainapp.models.adapters import linear_layers
from trainapp.models.inspect import last_layer
from trainapp.optim import fused_adamw
from trainapp.optim.low_precision import SMALLEST, bytes_of_temporaries
from trainapp.optim.quantizer import BLOCKS
from trainapp.techniques.chunked_loss import auto_rows
from trainapp.torch_private import local

MODES_IN_FP32 = ("fp32", "tf32")  # of precision: all others compute in 16 bits
# Of AdamW's two moments together, by their dtype, in numbers of fp32 per element: of codes with a scale per block.
_SIZE_OF_MOMENTS = {
    "fp32": 2.0,
    "bf16": 1.0,
    "8bit": 2 * (1 / 4 + 1 / BLOCKS["8bit"]),
    "4bit": 2 * (1 / 8 + 1 / BLOCKS["4bit"]),
}
Savings = Mapping[Category, float]  # bytes saved at most, by category


@dataclass(frozen=True)
class Shortage:
    """What filled memory, and what was asked for, when memory ran out. Sizes are bytes.

    Attributes:
        held: what was in memory, by category; gradients and optimizer state as large as the failed phase makes them.
        requested: by the operation that failed; 0 if unknown, or if no forward or backward asked for it.
        missing: at least so much less would have been needed; 0 if unknown.
        logit_rows: the rows of logits in the micro-batch; 0 if unknown.
        in_evaluation: whether an evaluation failed, which keeps nothing for a backward.
        is_split: whether a step has several micro-batches, whose gradients are added up.
    """

    held: Mapping[Category, int]
    requested: int = 0
    missing: int = 0
    logit_rows: int = 0
    in_evaluation: bool = False
    is_split: bool = False

    def of(self, category: Category) -> int:
        """Return the bytes that a category held."""
        return self.held.get(category, 0)


# --- optimizer state


def optimizer_state_size(config: Config) -> float | None:
    """Return the size of the optimizer's state, in numbers of fp32 per element of a matrix; None if it is not known."""
    arguments = config.optimizer.arguments
    match config.optimizer.target:
        case "torch.optim.SGD":
            return 1.0 if arguments.get("momentum") else 0.0
        case "torch.optim.Adam" | "torch.optim.AdamW":
            return 3.0 if arguments.get("amsgrad") else 2.0
        case "torch.optim.NAdam" | "torch.optim.RAdam":
            return 2.0
        case "trainapp.optim.low_precision.AdamW":
            return _SIZE_OF_MOMENTS[arguments.get("state_dtype", "bf16")]
        case "trainapp.optim.muon.Muon":
            return 1.0
        case "torch.optim.Adafactor":
            return 0.01  # a row and a column per matrix
        case _:
            return None


def by_other_optimizer(
    config: Config, changed: Config, model: nn.Module, shortage: Shortage, saved_activations: float = 0.0
) -> Savings:
    """Return what another optimizer saves of the state, less what its step needs; nothing if either's state is not
    known. saved_activations: bytes that are saved beside it.
    """
    state = optimizer_state_size(config)
    changed_state = optimizer_state_size(changed)
    if not state or changed_state is None:
        return {}
    saved = (1 - changed_state / state) * shortage.of(Category.OPTIMIZER_STATE)

    # Small parameters keep their moments in fp32.
    if changed.optimizer.arguments.get("state_dtype") in ("8bit", "4bit"):
        sizes = _trained_sizes(model)
        quantized = sum(size for size in sizes if size >= SMALLEST)
        saved *= quantized / max(1, sum(sizes))

    # What its step needs for a while: where activations were, or beside them.
    needed_before = _temporaries_of_step(config, model)
    needed = _temporaries_of_step(changed, model)
    if not config.optimizer.in_backward:
        room = _room_of_activations(model, shortage)
        needed_before = max(room, needed_before)
        needed = max(room - saved_activations, needed) + saved_activations
    return {Category.OPTIMIZER_STATE: saved - (needed - needed_before)}


def _room_of_activations(model: nn.Module, shortage: Shortage) -> float:
    """Return the bytes of activations that are free in the optimizer's step, which needs all gradients."""
    gradients = size_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    taken = shortage.of(Category.GRADIENTS) + shortage.of(Category.ACTIVATIONS) + shortage.requested
    return max(0.0, taken - gradients)


def _temporaries_of_step(config: Config, model: nn.Module) -> float:
    """Return the bytes of what an optimizer's step needs for a while, as far as it is known: of AdamW in fewer bits."""
    if config.optimizer.target != "trainapp.optim.low_precision.AdamW":
        return 0.0
    trained = [local(parameter) for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return 0.0
    largest = max(trained, key=Tensor.numel)
    if fused_adamw.may_update_on(largest.device):
        return 0.0
    state_dtype = config.optimizer.arguments.get("state_dtype", "bf16")
    return bytes_of_temporaries(largest.numel(), largest.device, state_dtype)


# --- activations


def by_16_bits(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what matmuls in bf16 save: half of the activations, less the copies of weights in bf16; nothing if they
    are in 16 bits.
    """
    if config.precision.mode not in MODES_IN_FP32:
        return {}
    copies = _bytes_of_copies(_copied_weights(changed, model, shortage))
    return {Category.ACTIVATIONS: _half_of_activations(shortage) - copies}


def by_bf16_weights(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what weights and moments in bf16 save, in addition to matmuls in bf16, which then copy no weights."""
    saved_activations = _by_16_bits_without_copies(config, model, shortage)
    return {
        Category.PARAMETERS: shortage.of(Category.PARAMETERS) / 2,
        Category.GRADIENTS: shortage.of(Category.GRADIENTS) / 2,
        Category.ACTIVATIONS: saved_activations,
        **by_other_optimizer(config, changed, model, shortage, saved_activations),
    }


def _half_of_activations(shortage: Shortage) -> float:
    return (shortage.of(Category.ACTIVATIONS) + shortage.requested) / 2


def _by_16_bits_without_copies(
    config: Config, model: nn.Module, shortage: Shortage, only_frozen: bool = False
) -> float:
    """Return what activations in 16 bits save beside weights that are in bf16 themselves: half of the activations or,
    if these are in 16 bits, the copies of the weights. only_frozen: whether trained weights stay in fp32.
    """
    if config.precision.mode in MODES_IN_FP32:
        return _half_of_activations(shortage)
    if config.precision.mode not in ("bf16", "fp16"):  # matmuls in 8 bits make other copies
        return 0.0
    weights = _copied_weights(config, model, shortage)
    if only_frozen:
        weights = [weight for weight in weights if not weight.requires_grad]
    return min(_bytes_of_copies(weights), shortage.of(Category.ACTIVATIONS) + shortage.requested)


def _copied_weights(config: Config, model: nn.Module, shortage: Shortage) -> list[Tensor]:
    """Return the weights in fp32 of which copies in 16 bits exist at once under autocast.

    Autocast keeps the copy of a trained weight until it ends, in evaluations too. The backward keeps those of all
    weights through which gradients flow: of the frozen ones, those behind a trained one.

    Args:
        config: with `precision` in 16 bits.
        model: its modules in the order of the forward.
        shortage: what filled memory.
    """
    if config.parallel.strategy == "fsdp":  # parameters are gathered in 16 bits
        return []
    copied = []
    others = []
    gradients_flow = False
    for weight in _multiplied_weights(model):
        gradients_flow = gradients_flow or weight.requires_grad
        if weight.requires_grad or (gradients_flow and not shortage.in_evaluation):
            copied.append(weight)
        else:
            others.append(weight)
    if others:  # their copies exist one at a time, each in its matmul
        copied.append(max(others, key=Tensor.numel))
    return copied


def _multiplied_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights in fp32 of matmuls and convolutions, tied ones once, in the order of the model's modules."""
    weights: dict[Tensor, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):  # rows are looked up
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.dtype == torch.float32:
                weights[parameter] = None
    return list(weights)


def _bytes_of_copies(weights: Iterable[Tensor]) -> float:
    return float(sum(2 * weight.numel() for weight in weights))


def by_chunks_of_logits(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what the loss in chunks saves: logits and, in training, their gradient, of all rows but one chunk's."""
    parts = last_layer(model)
    if parts is None or not isinstance(parts[1], nn.Linear):
        return {}
    head = parts[1]
    saved_rows = max(0, shortage.logit_rows - auto_rows(shortage.logit_rows, head))
    bytes_per_logit = 4 if shortage.in_evaluation else 8  # in fp32
    saved = saved_rows * head.out_features * bytes_per_logit
    return {Category.ACTIVATIONS: min(saved, shortage.of(Category.ACTIVATIONS) + shortage.requested)}


# --- gradients and parameters


def by_update_in_backward(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what an update in the backward saves: all gradients but the largest, of a step of one micro-batch."""
    if shortage.is_split:  # the earlier micro-batches' gradients are all kept
        return {}
    sizes = _trained_sizes(model)
    share_of_largest = max(sizes, default=0) / max(1, sum(sizes))
    return {Category.GRADIENTS: shortage.of(Category.GRADIENTS) * (1 - share_of_largest)}


def by_bf16_base(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what an adapter's base in bf16 saves: half of its parameters in fp32, and activations in 16 bits or, where
    they are, the base's copies in 16 bits.
    """
    savings = {Category.PARAMETERS: fp32_base_bytes(model) / 2}
    if changed.precision.mode not in MODES_IN_FP32:
        savings[Category.ACTIVATIONS] = _by_16_bits_without_copies(config, model, shortage, only_frozen=True)
    return savings


def fp32_base_bytes(model: nn.Module) -> int:
    """Return the bytes of the frozen parameters in fp32."""
    return size_of(p for p in model.parameters() if not p.requires_grad and p.dtype == torch.float32)


def by_adapters(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what adapters save: gradients and optimizer state of all but the adapters, less these themselves."""
    adapter_size = _adapter_size(changed, model)
    share_of_adapters = adapter_size / max(1, sum(_trained_sizes(model)))
    return {
        Category.PARAMETERS: -4 * adapter_size,  # they are in fp32
        Category.GRADIENTS: shortage.of(Category.GRADIENTS) * (1 - share_of_adapters),
        Category.OPTIMIZER_STATE: shortage.of(Category.OPTIMIZER_STATE) * (1 - share_of_adapters),
    }


def _adapter_size(config: Config, model: nn.Module) -> int:
    """Return the number of elements of the adapters: two matrices of `adapter.rank` per linear layer of the blocks."""
    if config.adapter.targets != "auto":
        return 0  # of layers by parts of their names: a small share
    size = 0
    for name in linear_layers(model):
        weight: Any = model.get_submodule(name).weight
        size += config.adapter.rank * sum(weight.shape)
    return size


def by_shards(config: Config, changed: Config, model: nn.Module, shortage: Shortage) -> Savings:
    """Return what FSDP saves: all but one rank's share of parameters, gradients and optimizer state."""
    ranks = torch.cuda.device_count()
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    share = 1 - 1 / max(1, ranks)
    categories = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    return {category: share * shortage.of(category) for category in categories}


def _trained_sizes(model: nn.Module) -> list[int]:
    """Return the number of elements of each trained parameter."""
    return [math.prod(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
