"""Tensors that may be whole or this rank's shard of one (a DTensor), and conversions between the two."""

from collections.abc import Iterable
from typing import Any

import torch

from trainapp.torch_fsdp import local_part


def is_shard(tensor: Any) -> bool:
    """Whether the tensor is this rank's shard of one."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> torch.Tensor:
    """The part of the tensor in this rank's memory, itself: no gradient goes through it to a shard."""
    return local_part(tensor) if is_shard(tensor) else tensor


def locals_of(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """`local` of each."""
    # Runs in every step: comparing the type is faster than looking up an attribute that is not there.
    return [t if type(t) is torch.Tensor else local(t) for t in tensors]


def whole(tensor: Any) -> torch.Tensor:
    """The whole tensor. Collective for a shard: call on every rank. Gathered on the device of the shards' mesh: FSDP's
    `cpu_offload` keeps them on the host, for which NCCL has no collectives.
    """
    return tensor.to(tensor.device_mesh.device_type).full_tensor() if is_shard(tensor) else tensor


@torch.no_grad()
def copy_into(target: Any, source: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be a shard. No communication: every rank has the whole source."""
    if is_shard(target):
        from torch.distributed.tensor import distribute_tensor

        part = distribute_tensor(source.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(source)
