"""A tensor may be whole or this rank's shard of one (a DTensor): how to go from one to the other."""

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What is in this rank's memory."""
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it. For all ranks where it is a shard."""
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor


@torch.no_grad()
def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be a shard of it. No communication: every rank has the whole."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        part = distribute_tensor(source.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(source)
