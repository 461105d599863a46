"""Uses every collective once before training, while memory is plentiful.

NCCL creates a group's communicator in its first collective, and since 2.22 connects the peers of an algorithm, with
buffers for each channel, when that algorithm is first chosen (NCCL_RUNTIME_CONNECT). It allocates past torch's
allocator, so that the first step that fills the device could fail there; and an error in NCCL cannot be recovered from
in place, since the other ranks have queued the same collective.
"""

import torch
import torch.distributed as dist

BYTES = (64, 32 * 2**20)  # of the whole buffer: small and large messages take different algorithms


def warm_up_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """The collectives that a run uses on the device, on one group (None: all ranks). Waits for the device.

    Collective: call on every rank. Takes at most twice the larger of BYTES, which the allocator then has in its cache.
    """
    world = dist.get_world_size(group)
    for size in BYTES:
        elements = max(1, size // 4 // world)
        whole = torch.zeros(elements * world, device=device)
        part = torch.zeros(elements, device=device)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.broadcast(whole, group_src=0, group=group)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(whole, group=group)
    dist.all_reduce(torch.zeros(2, dtype=torch.float64, device=device), group=group)  # as for totals
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # an error shows here rather than in the first step
