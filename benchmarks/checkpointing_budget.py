"""Activation checkpointing by budget against `full` and `selective`, at equal memory.

    python benchmarks/checkpointing_budget.py [--compile] [--quick] [--rounds 7] [--steps 1] [--width 256] [--depth 6]
                                              [--samples 4] [--json FILE]

One GPT, run with each mode, and with a budget at several limits from the peak of `full` up to that of `none`. Where a
limit is below the peak of `none`, a run without the budget has to take `full` (or `selective`, where that fits). For
the time, all runs take turns in one process; a ratio is that of a run's seconds per step to those of `full` in the
same round.

Uncompiled, the limit is `memory.limit`, the peak that of the first steps in live tensors, and the weights of all runs
must be equal at the end. With --compile it is `activation_checkpointing.bytes`, from what `full` saves for backward up
to what `none` does. Live tensors do not see what compiled code allocates: the peak is that of torch's profiler, above
what persists. The weights must agree to 1e-4.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _common import machine, quartiles, table

from trainapp.config import compose
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.train import loop
from trainapp.train.run import Run

WARM_UP = 4  # steps until a size is proven and memory no longer counted; the last one compiles
COMMON = (
    *("train.device=cpu", "train.max_steps=1000000", "train.max_epochs=null", "every.log=null", "every.eval=null"),
    *("every.save=null", "memory.guard=false", "checkpointing=off"),
    *("model=gpt", "data=synthetic_tokens", "data.vocab_size=512", "data.size=256"),
)
SHARES = (0.0, 0.25, 0.5, 0.75)  # of the way from `full` to `none`
TARGET = 6  # percent faster than `full`, within the same limit
TOLERANCE = 1e-4  # relative, for weights of compiled runs


@dataclass
class Contender:
    """A run that has warmed up. Sizes are bytes; limit: None without a budget; saved: for backward, if compiled."""

    run: Run
    limit: int | None
    peak: int
    saved: int = 0


def main() -> None:
    """Print one row per run. The exit code is 1 if weights differ or a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="with train.compile=true: some minutes to compile")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one budget, two rounds: does it work?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps per run and round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4, help="of 256 tokens, in one micro-batch")
    parser.add_argument("--json", type=Path, help="also write peaks and ratios to this file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.width, options.depth = 2, 64, 2
    logging.getLogger("trainapp").setLevel(logging.ERROR)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    common = (
        *(*COMMON, f"model.width={options.width}", f"model.depth={options.depth}", "model.heads=4"),
        *("model.context_length=256", f"batch.global_size={options.samples}", f"batch.micro_size={options.samples}"),
        f"train.compile={str(options.compile).lower()}",
    )
    shares = SHARES[-1:] if options.quick else SHARES
    contenders = within_bytes(common, shares) if options.compile else within_limits(common, shares)
    ratios = compare(contenders, options.rounds, options.steps)
    limited = [name for name, own in contenders.items() if own.limit is not None]
    gains = {name: 100 * (1 / statistics.median(ratios[name]) - 1) for name in limited}
    print(report(contenders, ratios))
    print(
        f"within the same limit, by budget: {min(gains.values()):+.1f}% to {max(gains.values()):+.1f}% faster than "
        f"full, median {statistics.median(gains.values()):+.1f}% (target {TARGET}%)"
    )
    if options.json:
        measured = {name: {"limit": c.limit, "peak": c.peak, "saved": c.saved} for name, c in contenders.items()}
        options.json.write_text(json.dumps({"runs": measured, "ratios": ratios, "gains": gains}, indent=1))
    alike = have_same_weights(contenders, TOLERANCE if options.compile else 0.0)
    for contender in contenders.values():
        contender.run.close()
    if not alike or any(is_above(contender, options.compile) for contender in contenders.values()):
        raise SystemExit(1)


def within_limits(common: tuple[str, ...], shares: tuple[float, ...]) -> dict[str, Contender]:
    """Uncompiled runs."""
    found = {mode: prepared(*common, f"activation_checkpointing={mode}") for mode in ("none", "selective", "full")}
    none, selective, full = (contender.peak for contender in found.values())
    limits = {f"{share:.0%} of the way": round(full + share * (none - full)) for share in shares}
    for name, limit in (limits | {"at the peak of selective": selective}).items():
        found[f"budget, {name}"] = prepared(
            *common, "activation_checkpointing=budget", f"memory.limit={limit}", limit=limit
        )
    return found


def within_bytes(common: tuple[str, ...], shares: tuple[float, ...]) -> dict[str, Contender]:
    """Compiled runs."""
    found = {mode: prepared(*common, f"activation_checkpointing={mode}") for mode in ("none", "full")}
    none, full = (contender.saved for contender in found.values())
    for share in shares:
        limit = round(full + share * (none - full))
        budget = ("activation_checkpointing=budget", f"activation_checkpointing.bytes={limit}")
        found[f"budget, {share:.0%} of the way"] = prepared(*common, *budget, limit=limit)
    return found


def prepared(*overrides: str, limit: int | None = None) -> Contender:
    """A run after its warm-up."""
    config = compose.from_command_line(overrides, tempfile.mkdtemp(prefix="budget_"))
    run = runner.prepare(config, StopRequest(), SingleRank())
    for _ in range(WARM_UP):
        loop.train_step(run)
    if config.train.compile:
        return Contender(run, limit, highest_of_step(run), saved_by_forward(run))
    return Contender(run, limit, run.memory.peak)


def saved_by_forward(run: Run) -> int:
    """Bytes that a forward of the model leaves for its backward, beside its results."""
    shape = (run.config.batch.global_size, run.config.model.arguments["context_length"])
    inputs = torch.zeros(shape, dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        results = run.state.model(inputs)
    before, *after = allocated(profile)
    return after[-1] - before - results.nbytes


def highest_of_step(run: Run) -> int:
    """Bytes that a step takes at its highest, above what persists."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loop.train_step(run)
    before, *after = allocated(profile)
    return max(after) - before


def allocated(profile: torch.profiler.profile) -> list[int]:
    """What the CPU's allocator has given out: before the first event of the profile, and after each."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    found.sort(key=lambda event: event["ts"])
    first = found[0]["args"]
    return [first["Total Allocated"] - first["Bytes"], *(event["args"]["Total Allocated"] for event in found)]


def compare(contenders: dict[str, Contender], rounds: int, steps: int) -> dict[str, list[float]]:
    """By run and round, the time of a step relative to that with `full`."""
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        seconds = {}
        for name in order:
            started = time.perf_counter()
            for _ in range(steps):
                loop.train_step(contenders[name].run)
            seconds[name] = time.perf_counter() - started
        for name in contenders:
            ratios[name].append(seconds[name] / seconds["full"])
    return ratios


def have_same_weights(contenders: dict[str, Contender], tolerance: float) -> bool:
    """Print by how much they differ at most, relative to all weights."""
    reference = weights(contenders["none"].run)
    worst = max(float((weights(own.run) - reference).norm() / reference.norm()) for own in contenders.values())
    print(f"weights equal bit for bit: {worst == 0}" if not tolerance else f"weights differ by at most {worst:.1e}")
    return worst <= tolerance


def weights(run: Run) -> torch.Tensor:
    """All parameters."""
    return torch.cat([p.detach().flatten() for p in run.state.model.parameters()])


def is_above(contender: Contender, compiled: bool) -> bool:
    """Whether a run exceeds its limit."""
    return contender.limit is not None and (contender.saved if compiled else contender.peak) > contender.limit


def report(contenders: dict[str, Contender], ratios: dict[str, list[float]]) -> str:
    """One row per run."""
    rows = []
    for name, own in contenders.items():
        low, middle, high = quartiles(ratios[name])
        sizes = ["" if own.limit is None else mib(own.limit), mib(own.saved) if own.saved else "", mib(own.peak)]
        rows.append([name, *sizes, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{100 * (1 / middle - 1):+.1f}%"])
    header = ["run", "limit MiB", "saved MiB", "peak MiB", "time vs full", "quartiles", "speed vs full"]
    return table(header, rows)


def mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
