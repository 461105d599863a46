"""What the limit bounds, how small it may be, and two jobs in one process, as in a sweep."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import torch

from trainapp.errors import UserError

from .. import jobs
from ..table import Table

GRANULARITY = 20 * jobs.MIB  # the size of an expandable segment's pieces (c10/cuda/CUDACachingAllocator.cpp, 2.11)


def check(table: Table, device: str, folder: Path) -> None:
    """Rows for each of the three."""
    settings = jobs.overrides(device, "gpt", "train.max_steps=4", "checkpointing=off")
    free = jobs.unlimited(folder / "free", *settings)
    allocator(table, device, folder, settings, jobs.limit_between(free, 0.5))
    reserved(table, device, folder, settings, jobs.limit_between(free, 0.5))
    with table.attempt("the smallest limit under which a run finishes", "a limit, and below it a message"):
        smallest(table, folder, settings, free)
    with table.attempt("a job without a limit after one with a limit", "no error"):
        two_jobs(table, device, folder, settings, jobs.limit_between(free, 0.5))


def allocator(table: Table, device: str, folder: Path, settings: tuple[str, ...], limit: int) -> None:
    """Whether the command line has set expandable segments in time: an error's snapshot has the settings in force."""
    name, expected = "expandable segments in a run of the command line", "in force"
    if device == "cpu":
        table.needs_cuda(name)
        return
    with table.attempt(name, expected):
        run_dir = folder / "command"
        environment = {"PYTORCH_CUDA_ALLOC_CONF": None, "PYTORCH_ALLOC_CONF": None}
        done = jobs.command(run_dir, *settings, f"memory.limit={limit}", env=environment)
        path = next((run_dir / "oom").glob("*.snapshot.pickle"), None)
        if path is None:
            raise RuntimeError(f"no snapshot; exit code {done.returncode}, {jobs.last_line(done.stderr)}")
        is_set = pickle.loads(path.read_bytes())["allocator_settings"]["expandable_segments"]
        table.expect(name, expected, "in force" if is_set else "not in force", is_set)


def reserved(table: Table, device: str, folder: Path, settings: tuple[str, ...], limit: int) -> None:
    """The peak of reserved bytes of a run that runs into its limit."""
    name, expected = "peak of reserved bytes, less the limit", f"at most {jobs.text(GRANULARITY)}"
    if device == "cpu":
        table.needs_cuda(name)
        return
    with table.attempt(name, expected):
        # Nothing is logged, so that the run does not reset the allocator's peak.
        result = jobs.launched(folder / "reserved", *settings, f"memory.limit={limit}", "every.log=null")
        over = torch.cuda.max_memory_reserved() - limit
        got = f"{jobs.text(over)}, limit {jobs.text(limit)}, {jobs.errors(result.oom_restarts)}"
        table.expect(name, expected, got, over <= GRANULARITY)


def smallest(table: Table, folder: Path, settings: tuple[str, ...], free: SimpleNamespace) -> None:
    """By bisection, to 5% of what a step needs."""
    low, high = 0.0, 1.0
    messages = []
    while high - low > 0.05:
        share = (low + high) / 2
        try:
            jobs.launched(folder / f"share_{share:.3f}", *settings, f"memory.limit={jobs.limit_between(free, share)}")
            high = share
        except UserError as error:  # the program's own message that nothing smaller can fit
            low = share
            messages.append(str(error).splitlines()[0][:120])
    limit = jobs.limit_between(free, high)
    table.measured(
        "the smallest limit under which a run finishes",
        f"{jobs.text(limit)}: {100 * high:.0f}% of what a step needs, beside {jobs.text(free.static)} that stay",
    )
    got = messages[-1] if messages else "every limit was enough"
    table.measured("below it", got)
    name, expected = "a limit below what stays between steps", "one message that names memory.limit"
    try:
        jobs.launched(folder / "too_small", *settings, f"memory.limit={free.static // 2}")
        got = "no error"
        met = False
    except UserError as error:
        got, met = str(error).splitlines()[0][:120], "memory.limit" in str(error)
    table.expect(name, expected, got, met)


def two_jobs(table: Table, device: str, folder: Path, settings: tuple[str, ...], limit: int) -> None:
    """The second job has its own limit from its build on, and none of the first one's memory."""
    first = jobs.launched(folder / "first", *settings, f"memory.limit={limit}")
    before = jobs.live_bytes(device)
    second = jobs.launched(folder / "second", *settings)
    table.expect(
        "a job without a limit after one with a limit",
        "no error",
        f"{jobs.errors(second.oom_restarts)}, {second.steps} steps",
        second.oom_restarts == 0 and second.steps == 4,
    )
    third = jobs.launched(folder / "third", *settings, f"memory.limit={limit}")
    table.expect(
        "a job with the first one's limit after both",
        "4 steps, at least 1 error",
        f"{third.steps} steps, {jobs.errors(third.oom_restarts)}, micro-batch {third.micro_size}; the first "
        f"{first.oom_restarts}, {first.micro_size}",
        third.steps == 4 and third.oom_restarts > 0,
    )
    growth = jobs.live_bytes(device) - before
    name = "memory after the third, less that after the first"
    table.expect(name, "at most 1 MiB", jobs.text(growth), growth <= jobs.MIB)
