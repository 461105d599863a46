"""How small the limit may be, and two jobs in one process, as in a sweep."""

from pathlib import Path
from types import SimpleNamespace

from gpu import on_gpu

from trainapp.errors import UserError

from .. import jobs
from ..table import Table

CLOSE = {"cuda": 0.05, "cpu": 0.5}  # of what a step needs: where the bisection ends


def check(table: Table, device: str, folder: Path) -> None:
    """Rows for both."""
    settings = jobs.overrides(device, "gpt", "train.max_steps=4", "checkpointing=off")
    free = jobs.unlimited(folder / "free", *settings)
    with table.attempt("the smallest limit under which a run finishes", "a limit, and below it a message"):
        smallest(table, folder, settings, free, CLOSE[device])
    with table.attempt("a job without a limit after one with a limit", "no error"):
        two_jobs(table, device, folder, settings, on_gpu.limit_between(free, 0.5))


def smallest(table: Table, folder: Path, settings: tuple[str, ...], free: SimpleNamespace, close: float) -> None:
    """By bisection, to this share of what a step needs."""
    low, high = 0.0, 1.0
    messages = []
    while high - low > close:
        share = (low + high) / 2
        try:
            on_gpu.launched(
                folder / f"share_{share:.3f}", *settings, f"memory.limit={on_gpu.limit_between(free, share)}"
            )
            high = share
        except UserError as error:  # the program's own message that nothing smaller can fit
            low = share
            messages.append(str(error).splitlines()[0][:120])
    limit = on_gpu.limit_between(free, high)
    table.measured(
        "the smallest limit under which a run finishes",
        f"{jobs.text(limit)}: {100 * high:.0f}% of what a step needs, beside {jobs.text(free.static)} that stay",
    )
    got = messages[-1] if messages else "every limit was enough"
    table.measured("below it", got)
    name, expected = "a limit below what stays between steps", "one message that names memory.limit"
    try:
        on_gpu.launched(folder / "too_small", *settings, f"memory.limit={free.static // 2}")
        got = "no error"
        met = False
    except UserError as error:
        got, met = str(error).splitlines()[0][:120], "memory.limit" in str(error)
    table.expect(name, expected, got, met)


def two_jobs(table: Table, device: str, folder: Path, settings: tuple[str, ...], limit: int) -> None:
    """The second job has its own limit from its build on, and none of the first one's memory."""
    first = on_gpu.launched(folder / "first", *settings, f"memory.limit={limit}")
    before = jobs.live_bytes(device)
    second = on_gpu.launched(folder / "second", *settings)
    table.expect(
        "a job without a limit after one with a limit",
        "no error",
        f"{jobs.errors(second.oom_restarts)}, {second.steps} steps",
        second.oom_restarts == 0 and second.steps == 4,
    )
    third = on_gpu.launched(folder / "third", *settings, f"memory.limit={limit}")
    table.expect(
        "a job with the first one's limit after both",
        "4 steps, at least 1 error",
        f"{third.steps} steps, {jobs.errors(third.oom_restarts)}, micro-batch {third.micro_size}; the first "
        f"{first.oom_restarts}, {first.micro_size}",
        third.steps == 4 and third.oom_restarts > 0,
    )
    growth = jobs.live_bytes(device) - before
    name = "memory after the third, less that after the first"
    table.expect(name, "at most 1 MiB", jobs.text(growth), growth <= on_gpu.MIB)
