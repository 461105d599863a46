"""Shards of tensors, in a process that stands for one of several ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainapp.parallel.strategy import is_shard, local
from trainapp.planning.simulated_ranks import simulated


def test_the_local_part_of_a_parameter_is_itself():
    """A view for the backward, which torch makes by default, costs time wherever shards are counted."""
    with simulated(0, 2, torch.device("cpu")):
        own = torch.ones(2)
        shard = nn.Parameter(DTensor.from_local(own, init_device_mesh("cpu", (2,)), [Shard(0)]))
        assert is_shard(shard)
        assert shard.to_local().grad_fn is not None
        assert local(shard) is local(shard)
        assert local(shard).grad_fn is None
        assert local(shard).data_ptr() == own.data_ptr()
        assert local(own) is own
