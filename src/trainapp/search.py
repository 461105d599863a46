"""Finds the micro-batch that fits."""

from dataclasses import dataclass


@dataclass
class SizeSearch:
    """The size in force for one kind of work (training or evaluation), and how sure it is.

    size: samples for each forward on one rank; clean_steps: successes until it counts as proven.
    """

    size: int
    clean_steps: int
    clean: int = 0

    @property
    def proven(self) -> bool:
        """Proven sizes are no longer watched, which costs time on the CPU."""
        return self.clean >= self.clean_steps

    def succeeded(self) -> None:
        """A whole step (or evaluation batch) of this size ended well."""
        self.clean += 1

    def shrink(self) -> bool:
        """Halve, after a failure. False when nothing is left to halve."""
        if self.size <= 1:
            return False
        self.size, self.clean = self.size // 2, 0
        return True
