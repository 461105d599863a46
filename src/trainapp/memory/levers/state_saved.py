"""What a lever saves of what persists between steps, in bytes."""

from collections.abc import Mapping

from trainapp.config.schema import Config
from trainapp.memory.kinds import MemoryKind


def optimizer_state(static: Mapping[MemoryKind, int], config: Config) -> int:
    """All optimizer state."""
    return static[MemoryKind.OPTIMIZER_STATE]


def one_moment_of_two(static: Mapping[MemoryKind, int], config: Config) -> int:
    """Half of Adam's state: that of SGD with momentum is the other half."""
    return static[MemoryKind.OPTIMIZER_STATE] // 2 if "Adam" in config.optimizer.target else 0


def half_of_adams_state(static: Mapping[MemoryKind, int], config: Config) -> int:
    """Half of the state of Adam or AdamW, and of no other optimizer."""
    is_adam = config.optimizer.target in ("torch.optim.Adam", "torch.optim.AdamW")
    return static[MemoryKind.OPTIMIZER_STATE] // 2 if is_adam else 0


def weight_average(static: Mapping[MemoryKind, int], config: Config) -> int:
    """The average of the weights."""
    return static[MemoryKind.WEIGHT_AVERAGE]
