"""Made-up values for a trace: tensors have shapes but no data, so reads get fixed answers."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trainapp.torch_private import ASKS_DEVICE, FUSED_WITHOUT_META, READ_OPERATORS, DispatchMode, is_fake
from trainapp.training.phase import Phase

_EQUAL = torch.ops.aten.equal.default  # torch.equal also reads
_GROUP_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward.default
# oneDNN keeps a workspace for the backward whose size its fake kernel does not know (0: 61% of one model's peak).
_UNKNOWN_SIZES = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
# In the other phases the step itself reads: counts, norms, the loss scale.
_MODEL_PHASES = frozenset({Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.BACKWARD_AFTER_UPDATES, Phase.METRIC})


class NeedsValues(Exception):
    """The model's memory depends on values, which a trace does not have. The message says where."""


class MadeUpValues(DispatchMode):
    """Answers the reads of optimizers and of the step: False, 1 or 1.0 (zero would divide by zero in Adam).

    Args:
        phase: returns where a recorded step is; None outside of it.
        refuses: raise NeedsValues where the model or the task reads. Otherwise it gets the same answers, up to
            MOST_READS times: a loop until convergence would never end.
    """

    MOST_READS = 1000

    def __init__(self, phase: Callable[[], Phase | None] = lambda: None, refuses: bool = True):
        super().__init__()
        self.phase = phase
        self.refuses = refuses
        self.reads = 0  # by the model and the task

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reads, and what has no fake kernel.
        if func is ASKS_DEVICE:
            return args[0].device
        if func in READ_OPERATORS and getattr(args[0], "constant", None) is None:
            return self._answer(args[0])
        if func is _EQUAL:
            return bool(self._answer(torch.empty((), dtype=torch.bool)))
        if func.overloadpacket in FUSED_WITHOUT_META:
            return None
        if func in _UNKNOWN_SIZES and self.refuses:
            raise NeedsValues(f"{func}: what it keeps for the backward is known only to a real step")

        # All else computes shapes.
        result = func(*args, **(kwargs or {}))
        if func is _GROUP_NORM_BACKWARD and result[0] is not None:  # fp32 in torch 2.13's decomposition
            return result[0].to(args[1].dtype), *result[1:]
        return result

    def _answer(self, tensor: Tensor) -> bool | int | float:
        phase = self.phase()
        if phase in _MODEL_PHASES:
            self.reads += 1
            if self.refuses or self.reads > self.MOST_READS:
                raise NeedsValues(f"the model or its task reads the value of a tensor ({phase.value})")

        if tensor.dtype == torch.bool:
            return False
        if tensor.dtype.is_floating_point:
            return 1.0
        return 1


def document_borders(is_packed: bool) -> contextlib.AbstractContextManager[Any]:
    """Tell Transformers models, inside the block, whether a sequence holds several documents.

    They infer it from position ids that they generate, and without values would assume restarts and build an attention
    mask that no run has.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find_documents = getattr(masking, "find_packed_sequence_indices", None)
    if find_documents is None:  # another version of Transformers: such a plan is then marked as an estimate
        return contextlib.nullcontext()

    def find_documents_without_values(position_ids: Tensor) -> Any:
        documents = find_documents(position_ids)
        # The model has generated the ids if all samples share one row.
        are_generated = len(position_ids) == 1 or position_ids.stride(0) == 0
        if is_fake(position_ids) and are_generated and not is_packed:
            return None
        return documents

    return mock.patch.object(masking, "find_packed_sequence_indices", find_documents_without_values)
