"""One process and many have the same interface; shards; what is used before training."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainapp.parallel.ranks import DistributedRanks, Flags, Ranks, SingleRank
from trainapp.planning.simulated_ranks import simulated
from trainapp.torch_private import is_shard, local

from .cell import GPT, TINY
from .variants import train_after_warming_up


def test_many_ranks_inherit_no_identity():
    methods = {name for name, _ in inspect.getmembers(Ranks, inspect.isfunction) if not name.startswith("_")}
    assert methods - vars(DistributedRanks).keys() == {"collective", "exchange_in_library", "meshes"}


def test_a_signal_during_the_step_is_seen_at_its_end():
    ranks = SingleRank()
    signal = []
    ranks.start_flag_exchange(lambda: Flags(stop_signal=len(signal)))
    signal.append(2)
    assert ranks.finish_flag_exchange() == Flags(stop_signal=1, still_saving=False, size_may_change=False)


def test_the_local_part_of_a_parameter_is_itself():
    """A view for the backward, which torch makes by default, costs time wherever shards are counted."""
    with simulated(0, 2, torch.device("cpu")):
        plain = torch.ones(2)
        shard = nn.Parameter(DTensor.from_local(plain, init_device_mesh("cpu", (2,)), [Shard(0)]))
        assert is_shard(shard)
        assert shard.to_local().grad_fn is not None
        assert local(shard) is local(shard)
        assert local(shard).grad_fn is None
        assert local(shard).data_ptr() == plain.data_ptr()
        assert local(plain) is plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "world", "groups"),
    [("ddp", 2, 1), ("fsdp", 2, 1), pytest.param("hsdp", 4, 3, marks=pytest.mark.nightly)],
)
def test_no_collective_is_used_for_the_first_time_in_training(cell, spread, world, groups):
    """In a forward and backward, clipping, fp16's flags and a log step."""
    every = ("train.max_steps=2", "train.grad_clip=0.1", "precision=fp16", "precision.initial_scale=256")
    chosen = (f"parallel={spread}", *every, f"batch.global_size={4 * world}")
    for used in cell.run(world, *chosen, tiny=(*TINY, *GPT), function=train_after_warming_up):
        assert used.training, "nothing was recorded: this proves nothing"
        assert used.training <= used.warming_up
        assert len({group for _, group in used.training}) == groups  # one copy is sharded over all ranks
