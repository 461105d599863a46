"""Where levers apply: the functions `needs_...` raise UserError for a configuration that has the lever elsewhere. Where
one would do anything that lacks it: the others.
"""

import torch
import torch.distributed as dist

from trainapp.config import targets
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.models.adapters import linear_layers
from trainapp.models.inspect import blocks_of, has_batchnorm, instead_of_batchnorm
from trainapp.optim.low_precision import has_moments_in_fewer_bits
from trainapp.optim.quantized_products import MULTIPLE, quantizable
from trainapp.techniques import chunked_loss
from trainapp.techniques.lever import Situation


def needs_blocks(situation: Situation) -> None:
    blocks_of(situation.model, f"activation_checkpointing={situation.config.activation_checkpointing.mode}")


def needs_layers_for_adapters(situation: Situation) -> None:
    """Linear ones in blocks, unless the modules are named that get adapters."""
    if situation.config.adapter.targets == "auto":
        linear_layers(situation.model)


def needs_movable_activations(situation: Situation) -> None:
    """For activation offload."""
    config = situation.config
    mode, checkpointing = config.memory.offload_activations, config.activation_checkpointing.mode
    setting = f"memory.offload_activations={mode}"
    if config.train.compile:
        raise UserError(
            f"{setting} with train.compile=true: a compiled graph saves its tensors itself; use "
            "train.compile=false, or leave the setting out"
        )
    if mode == "inputs" and checkpointing == "none":
        raise UserError(
            f"{setting}: moves the inputs of checkpointed blocks, but activation_checkpointing=none; use "
            "activation_checkpointing=full, or memory.offload_activations=all"
        )
    if mode != "inputs" and config.parallel.strategy == "fsdp":
        raise UserError(
            f"{setting} with parallel=fsdp: what FSDP has gathered would be moved, too, where autocast casts it; use "
            "memory.offload_activations=inputs with activation_checkpointing=full"
        )


def needs_movable_inputs(situation: Situation) -> None:
    """For the offload of blocks' inputs."""
    needs_movable_activations(situation)
    blocks_of(situation.model, "memory.offload_activations=inputs")


def needs_a_head(situation: Situation) -> None:
    if not situation.knows_loss:
        raise UserError(
            f"{chunked_loss.SETTING}={situation.config.memory.loss_chunk}: the task computes its own loss; call "
            "trainapp.tasks.linear_cross_entropy in it, or leave the setting out"
        )
    chunked_loss.require_head(situation.config, situation.model)


def needs_rounding_by_chance(situation: Situation) -> None:
    config, setting = situation.config, "precision=bf16_pure"
    if has_batchnorm(situation.model):
        remedy = instead_of_batchnorm(config.model)
        raise UserError(f"{setting}: BatchNorm needs its weights in fp32; use precision=bf16, or {remedy}")
    if config.train.ema is not None:
        raise UserError(
            f"{setting} with train.ema={config.train.ema}: an average in bf16 would stand still, as its changes are "
            "smaller than its last bit; use train.ema=null, or precision=bf16"
        )
    if config.precision.mode == "bf16_pure":
        kind = targets.locate(config.optimizer.target, "optimizer._target_", config.user_packages)
        if not getattr(kind, "rounds_by_chance", False):
            raise UserError(
                f"{setting} with {config.optimizer.target}: updates smaller than half of the last bit of a bf16 weight "
                "(1/512 of it) would be lost; use optimizer=adamw_bf16, which rounds by chance, or precision=bf16"
            )


def needs_linear_layers(situation: Situation) -> None:
    """For products in 8 bits."""
    kind, model = situation.config.precision.mode, situation.model
    if not quantizable(blocks_of(model, f"precision={kind}")):
        raise UserError(
            f"precision={kind}: no nn.Linear in the blocks of {type(model).__name__} has two dimensions that are "
            f"multiples of {MULTIPLE}, so that nothing would be computed in {kind}; use precision=bf16"
        )


def needs_updates_one_by_one(situation: Situation) -> None:
    """`optimizer.in_backward`: what needs all gradients before the first update, or what other ranks would have to
    add to them, or the updated parameters of a step that is then not taken.
    """
    config = situation.config
    if config.train.grad_clip is not None:
        raise UserError(
            f"optimizer.in_backward=true with train.grad_clip={config.train.grad_clip}: the norm of all gradients is "
            "known only after the backward, when the parameters have been updated; use train.grad_clip=null"
        )
    _need_separate_updates(config)


def needs_updates_in_place_of_clipping(situation: Situation) -> None:
    """The same, where it replaces clipping."""
    _need_separate_updates(situation.config)


def _need_separate_updates(config: Config) -> None:
    setting = "optimizer.in_backward=true"
    if config.precision.mode == "fp16":
        raise UserError(
            f"{setting} with precision=fp16: a step with a gradient that overflows is skipped, but a part of it has "
            "been taken by then; use precision=bf16"
        )
    if config.train.nonfinite == "skip":
        raise UserError(
            f"{setting} with train.nonfinite=skip: a step cannot be left out once its backward has begun; use "
            "train.nonfinite=stop"
        )
    if config.train.compile:
        raise UserError(
            f"{setting} with train.compile=true: where a model is compiled in several graphs, one of them may read a "
            "parameter after its update, which nothing would notice; use train.compile=false"
        )
    if config.parallel.strategy != "single":
        raise UserError(
            f"{setting} with parallel.strategy={config.parallel.strategy}: gradients are summed over ranks only "
            "after the backward of each is complete; use parallel=single"
        )


def needs_updates_after_backward(situation: Situation) -> None:
    """For the optimizer on the host."""
    config, setting = situation.config, "optimizer.offload=true"
    if config.parallel.strategy == "fsdp":
        raise UserError(
            f"{setting} with parallel=fsdp: FSDP keeps its shards on the host itself; use "
            "parallel.fsdp.cpu_offload=true"
        )
    if config.optimizer.in_backward:
        raise UserError(
            f"{setting} with optimizer.in_backward=true: the backward would wait for the host once per parameter; use "
            "one of them"
        )


def needs_shards(situation: Situation) -> None:
    strategy = situation.config.parallel.strategy
    if strategy != "fsdp":
        raise UserError(
            f"parallel.fsdp.cpu_offload=true: only shards are kept on the host, but parallel.strategy={strategy}; use "
            "parallel=fsdp, or leave it out"
        )


def needs_drawn_shards(situation: Situation) -> None:
    """For parameters that are drawn where their shards are."""
    strategy, model = situation.config.parallel.strategy, situation.model
    if strategy != "fsdp":
        raise UserError(
            f"parallel.fsdp.meta_init=true: only shards are drawn one by one, but parallel.strategy={strategy}; use "
            "parallel=fsdp, or leave it out"
        )
    if not callable(getattr(model, "init_weights", None)):
        raise UserError(
            f"parallel.fsdp.meta_init=true: {type(model).__name__} has no method `init_weights()` that draws its "
            "parameters and fills its buffers; add one, or use meta_init=false"
        )


def needs_unsharded_blocks(situation: Situation) -> None:
    """Quantized moments: the blocks of values that share a scale would change with the number of ranks."""
    config = situation.config
    if config.parallel.strategy == "fsdp":
        kind = config.optimizer.arguments.get("state_dtype", "8bit")
        raise UserError(
            f"optimizer.state_dtype={kind} with parallel=fsdp: the values that share a scale would change with the "
            "number of ranks; use optimizer=adamw_bf16, or parallel=ddp"
        )


def needs_whole_parameters(situation: Situation) -> None:
    """Adafactor's sums over rows and columns: torch 2.13 has no rule for some of them on shards."""
    if situation.config.parallel.strategy == "fsdp":
        raise UserError(
            "optimizer=adafactor with parallel=fsdp: it needs whole matrices, of which each rank has a shard; use "
            "optimizer=adamw_bf16, or parallel=ddp"
        )


def is_on_a_gpu(situation: Situation) -> bool:
    """For what is moved to the host: on the CPU it may be set, and moves nothing."""
    return any(p.device.type == "cuda" for p in situation.model.parameters())


def trains_in_32_bits(situation: Situation) -> bool:
    """For AdamW in fewer bits, which stores the moments of complex and fp64 parameters as they are."""
    return all(has_moments_in_fewer_bits(p) for p in situation.model.parameters() if p.requires_grad)


def trains_real_numbers(situation: Situation) -> bool:
    """For Adafactor, which refuses complex parameters."""
    return not any(p.is_complex() for p in situation.model.parameters() if p.requires_grad)


def clips(situation: Situation) -> bool:
    """For what replaces clipping."""
    return situation.config.train.grad_clip is not None


def computes_in_bf16(situation: Situation) -> bool:
    """Not GPUs before Ampere, which emulate it. Of a GPU that is planned for, `plan.cuda.planner` knows."""
    is_here = is_on_a_gpu(situation) and torch.cuda.is_available()
    return not is_here or torch.cuda.is_bf16_supported(including_emulation=False)


def has_ranks_and_blocks(situation: Situation) -> bool:
    """For FSDP: several ranks, or GPUs for them, and blocks to gather one by one."""
    try:
        blocks_of(situation.model, "parallel=fsdp")
    except UserError:
        return False
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return is_on_a_gpu(situation) and torch.cuda.device_count() > 1
