"""The module in which memory ran out."""

import contextlib
from collections.abc import Iterator

from trainapp.torch_private import ForwardModuleTracker


class ModulePath:
    """The module that is running, in forward or backward, and the one in which an error was raised."""

    def __init__(self) -> None:
        self._at_failure = ""  # "" without a failure
        self._tracker: ForwardModuleTracker | None = None

    @property
    def running(self) -> str:
        """The innermost running module, by its name in the whole model; "" outside all modules."""
        # The tracker has the names of all running modules; the innermost has the most parts.
        names = self._tracker.parents if self._tracker else ()
        innermost = max(names, key=lambda name: name.count("."), default="")
        _, _, path = innermost.partition(".")  # names begin with the model's class
        return path

    def take_failing(self) -> str:
        """Return the module in which the last watched block failed, and forget it: the next error may be in a block
        that is not watched. "" if it is unknown.
        """
        path = self._at_failure
        self._at_failure = ""
        return path

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Track the running module inside the block, a forward and backward. Costs a few microseconds per module."""
        with ForwardModuleTracker() as tracker:
            self._tracker = tracker
            try:
                yield
            except BaseException:
                self._at_failure = self.running
                raise
            finally:
                self._tracker = None
