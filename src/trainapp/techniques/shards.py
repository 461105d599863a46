"""The entries of the list of levers for several ranks: FSDP and its settings."""

from trainapp.techniques.conditions import has_ranks_and_blocks, needs_drawn_shards, needs_shards
from trainapp.techniques.lever import Lever

SHARDS = (
    Lever(
        "parallel=fsdp",
        saves="parameters, gradients and optimizer state, divided by the number of ranks",
        costs="traffic: parameters are gathered in every forward and backward",
        applies="several ranks, or GPUs for them; models with `blocks()`",
        changes={"parallel.strategy": "fsdp"},
        helps=has_ranks_and_blocks,
        result="same",
        shrinks_state=True,
    ),
    Lever(
        "parallel.fsdp.reshard_after_forward=true",
        saves="the gathered parameters of all blocks but one between forward and backward",
        costs="gathering them again in backward",
        applies="`parallel=fsdp`, by default",
        changes={"parallel.fsdp.reshard_after_forward": True},
        is_default=True,
        result="same",
    ),
    Lever(
        "parallel.fsdp.sync_every_micro_batch=true",
        saves="unsharded gradients between micro-batches",
        costs="a reduction per micro-batch instead of one per step",
        applies="`parallel=fsdp`, by default",
        changes={"parallel.fsdp.sync_every_micro_batch": True},
        is_default=True,
        result="same",
    ),
    Lever(
        "parallel.fsdp.cpu_offload=true",
        saves="the device's part of parameters, gradients and optimizer state",
        costs="copies between host and device, and the optimizer's step on the host",
        applies="`parallel=fsdp`",
        changes={"parallel.fsdp.cpu_offload": True},
        require=needs_shards,
        result="same",
        shrinks_state=True,
    ),
    Lever(
        "parallel.fsdp.meta_init=true",
        saves="the whole model on each device before it is sharded",
        costs="other initial weights, of the same distribution",
        applies="`parallel=fsdp`, models with `init_weights()`",
        changes={"parallel.fsdp.meta_init": True},
        require=needs_drawn_shards,
    ),
)
