"""Whether a launcher has restarted this process. Imports no torch."""

import os


def has_restarted() -> bool:
    """Whether the launcher has started the workers of this run before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
