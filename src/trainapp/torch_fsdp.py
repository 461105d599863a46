"""What FSDP2 and its DTensors offer no public way to do. FSDP2's collectives: `torch_private.fsdp_collectives`."""

import operator
from typing import Any

# DTensor -> this rank's part, itself. `to_local()` makes a view of each parameter's in every call, also where no
# gradient is recorded (2.13, distributed/tensor/_api.py), which took a fifth of a trace of many shards.
local_part = operator.attrgetter("_local_tensor")


def prepare(root: Any) -> None:
    """Do now what FSDP2 otherwise does in the first forward of its root module, an FSDPModule.

    It then decides in which dtype the gradients of each block are reduced, by its parameters that require gradients at
    that moment (torch 2.13, fsdp/_fully_shard/_fsdp_param_group.py, `_init_mp_dtypes`).
    """
    root._get_fsdp_state()._lazy_init()
