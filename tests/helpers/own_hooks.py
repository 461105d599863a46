"""Metrics, callbacks and trackers of a user's own, for tests."""

import torch

from trainapp.tracking.loggers import Logger

SEEN: list = []  # what callbacks and trackers were called with; tests clear it


class Correct:
    """How many were right, and of how many: exact on any number of ranks."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.total = self.updates = 0

    def update(self, logits, targets):
        self.updates += 1
        self.total += len(targets)
        self.right += int((logits.argmax(-1) == targets).sum())

    def compute(self):
        return {"share": self.right / self.total, "right": self.right, "total": self.total}

    def merge(self, other):
        self.right += other.right
        self.total += other.total


class Unmergeable:
    """No `merge`: for one rank."""

    def __init__(self):
        self.total = 0

    def reset(self):
        self.total = 0

    def update(self, logits, targets):
        self.total += len(targets)

    def compute(self):
        return self.total


class OfThree(Correct):
    """Of three classes."""

    def update(self, logits, targets):
        if logits.shape[1:] != (3,):
            raise ValueError("expected logits [B, 3]")


class TearsApart(Correct):
    """Runs out of memory in the middle of its third update, once: half of the update is done by then."""

    has_failed = False

    def update(self, logits, targets):
        self.total += len(targets)
        if self.updates == 2 and not TearsApart.has_failed:
            TearsApart.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)")
        self.updates += 1
        self.right += int((logits.argmax(-1) == targets).sum())


class Large(Unmergeable):
    """A state of a megabyte."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(2**18)


class Keeps(Unmergeable):
    """Keeps all logits in a list, and a sum that each update replaces and `reset` writes in place."""

    def __init__(self):
        super().__init__()
        self.kept, self.sum = [], torch.zeros(())

    def reset(self):
        super().reset()
        self.kept = []
        self.sum.zero_()

    def update(self, logits, targets):
        super().update(logits, targets)
        self.kept.append(logits)
        self.sum = self.sum + logits.sum()


class Fixed(Unmergeable):
    """Computes what it was given."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def compute(self):
        return torch.tensor(self.value) if isinstance(self.value, list) else self.value


class FailsLate(Correct):
    """Fails where it computes."""

    def compute(self):
        raise KeyError("no such threshold")


class Draws(Correct):
    """Draws numbers in each update."""

    def update(self, logits, targets):
        torch.rand(3)
        super().update(logits, targets)


def silent(model, batch):
    """A task that passes nothing on."""
    logits = model(batch["inputs"])
    return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


def own_sum(model, batch):
    """A task whose own sum has the name of a configured metric."""
    loss, count, _ = silent(model, batch)
    return loss, count, {"mine": loss.detach()}


def by_name(model, batch):
    """Keyword arguments for one metric, from a function."""
    logits = model(batch["inputs"])
    loss = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits), {"mine": lambda: {"targets": batch["targets"], "logits": logits.detach()}}


# Callbacks


class Records:
    """Every call."""

    def after_step(self, view):
        SEEN.append(("step", view.step, view.samples, view.model.training))

    def after_evaluation(self, view, metrics):
        SEEN.append(("evaluation", view.step, dict(metrics)))

    def on_end(self, view):
        SEEN.append(("end", view.step))


class Disturbs:
    """Draws numbers, switches modes and leaves gradients: none of it may reach the run."""

    def after_step(self, view):
        torch.rand(3)
        view.model.train()
        with torch.enable_grad():
            sum(p.sum() for p in view.model.parameters()).backward()


class Fails:
    def __init__(self, step=2):
        self.step = step

    def after_step(self, view):
        if view.step == self.step:
            raise ValueError("no such plot")


class RunsOut:
    def after_evaluation(self, view, metrics):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)")


class StopsAt:
    """rank: the only one that asks for it; None: all."""

    def __init__(self, step, rank=None):
        self.step, self.rank = step, rank

    def after_step(self, view):
        if view.step >= self.step and self.rank in (None, view.rank):
            view.stop(f"step {self.step}")


class Nothing:
    """No method that would be called."""


# Trackers


class Breaks(Logger):
    """Fails from a call on."""

    def __init__(self, method="scalars", calls=0):
        self.method, self.calls = method, calls

    def _count(self, method):
        SEEN.append(method)
        if method == self.method:
            self.calls -= 1
            if self.calls < 0:
                raise ConnectionError("no route to host\nand more")

    def start(self, start):
        self._count("start")

    def scalars(self, group, values, step):
        self._count("scalars")

    def close(self):
        self._count("close")
