"""Names of the scalars that the program itself logs: see `training.events` and `Meter.scalars`. Imports no torch."""

OF_THE_STEP = frozenset({"loss", "step", "samples", "epoch", "lr", "grad_norm", "skipped_steps"})
# These vary between identical runs.
OF_THE_MACHINE = frozenset({"data_wait", "samples_per_second", "tokens_per_second", "mfu"})
_PREFIXES_OF_THE_MACHINE = ("memory/", "batch/")  # batch/: how a step is cut, which follows from the memory


def is_of_machine(name: str) -> bool:
    """Return whether a logged scalar tells how a run computed (time, memory, micro-batches), not what it computed."""
    return name in OF_THE_MACHINE or name.startswith(_PREFIXES_OF_THE_MACHINE)
