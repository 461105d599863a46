"""The levers that keep fewer activations on the device: part of the one list in `catalogue`."""

from trainapp.techniques.conditions import (
    is_on_a_gpu,
    needs_blocks,
    needs_movable_activations,
    needs_movable_inputs,
)
from trainapp.techniques.lever import Lever

ACTIVATIONS = (
    Lever(
        "activation_checkpointing=full",
        saves="all activations of the blocks but their inputs",
        costs="a second forward of the blocks: about a third more time",
        applies="models with `blocks()`",
        changes={"activation_checkpointing.mode": "full"},
        require=needs_blocks,
        result="same",
    ),
    Lever(
        "activation_checkpointing=selective",
        saves="activations that are cheap to recompute",
        costs="Python for each operation of the blocks: a tenth of a GPT's step, a third of a small ResNet's",
        applies="models with `blocks()`",
        changes={"activation_checkpointing.mode": "selective"},
        require=needs_blocks,
        result="same",
    ),
    Lever(
        "activation_checkpointing=auto",
        saves="as many activations of the blocks as the limit asks for: each is kept, `selective` or `full`",
        costs="nothing where all fits, up to that of `full`; some seconds for two plans before the model is built",
        applies="models with `blocks()`",
        changes={"activation_checkpointing.mode": "auto"},
        require=needs_blocks,
        result="same",
    ),
    Lever(
        "memory.offload_activations=all",
        saves="all activations of 1 MiB and more, but those on their way",
        costs="host memory; time where copies take longer than computing",
        applies="CUDA, without `parallel=fsdp` and `train.compile`",
        changes={"memory.offload_activations": "all"},
        require=needs_movable_activations,
        helps=is_on_a_gpu,
        result="same",
    ),
    Lever(
        "memory.offload_activations=inputs activation_checkpointing=full",
        saves="all activations of the blocks",
        costs="a second forward of the blocks; host memory; hardly any time for the copies",
        applies="CUDA, models with `blocks()`, without `train.compile`",
        changes={"memory.offload_activations": "inputs", "activation_checkpointing.mode": "full"},
        in_force=lambda config: config.memory.offload_activations == "inputs",
        require=needs_movable_inputs,
        helps=is_on_a_gpu,
        result="same",
    ),
)
