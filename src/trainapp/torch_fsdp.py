"""What FSDP2 offers no public way to do. Its collectives: `torch_private.fsdp_collectives`."""

from typing import Any


def prepare(root: Any) -> None:
    """Do now what FSDP2 otherwise does in the first forward of its root module, an FSDPModule.

    It then decides in which dtype the gradients of each block are reduced, by its parameters that require gradients at
    that moment (torch 2.13, fsdp/_fully_shard/_fsdp_param_group.py, `_init_mp_dtypes`).
    """
    root._get_fsdp_state()._lazy_init()
