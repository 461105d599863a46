"""The categories of memory that a run uses."""

from enum import Enum


class Category(str, Enum):
    """What a piece of memory holds. Listed in the stacking order of a timeline.

    The value is the name in metrics, as in `memory/optimizer_state`, and in a report's JSON; `label` is for people.
    """

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFERS = "buffers"
    WEIGHT_AVERAGE = "weight_average"
    BATCH = "batch"
    GRADIENTS = "gradients"
    COMMUNICATION_BUFFERS = "communication_buffers"  # DDP's buckets, of which its gradients are views; FSDP's messages
    KEPT = "kept"  # what lives on from earlier steps and is none of these: a memory bank in a list, a teacher
    ACTIVATIONS = "activations"  # whatever is not one of the others
    # CUDA: the context and what libraries allocate for themselves, some hundred MiB, and other processes. The driver's
    # counter does not tell them apart.
    OUTSIDE_ALLOCATOR = "outside_allocator"

    def __str__(self) -> str:  # Enum's own differs between Python 3.10 and 3.12 inside an f-string
        return self.value

    @property
    def label(self) -> str:
        """The name with spaces: `optimizer state`."""
        return self.value.replace("_", " ")
