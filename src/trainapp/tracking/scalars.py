"""Names of the scalars that the program itself logs: see `training.reporting` and `Meter.scalars`. Imports no torch."""

STEP_SCALARS = frozenset({"loss", "step", "samples", "epoch", "lr", "grad_norm", "skipped_steps", "loss_scale"})
# These vary between identical runs.
MACHINE_SCALARS = frozenset({"data_wait", "samples_per_second", "tokens_per_second", "mfu"})
_MACHINE_PREFIXES = ("memory/", "batch/")  # batch/: how a step is split, which follows from the memory


def is_machine_scalar(name: str) -> bool:
    """Return whether a logged scalar tells how a run computed (time, memory, micro-batches), not what it computed."""
    return name in MACHINE_SCALARS or name.startswith(_MACHINE_PREFIXES)
