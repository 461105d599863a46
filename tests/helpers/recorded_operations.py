"""A mode under which tests see which operations run."""

from trainapp.torch_private import DispatchMode


class RecordedOperations(DispatchMode):
    """Runs each operation, and keeps it in `seen`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def names(self):
        """Those of the operations, without their overloads."""
        return [func.overloadpacket.__name__ for func in self.seen]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
