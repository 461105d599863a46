"""Activation checkpointing by budget against `full` and `selective`, at equal memory.

    python benchmarks/checkpointing_budget.py [--rounds 7] [--steps 1] [--width 256] [--depth 6] [--json FILE]

One GPT, run with each mode, and with a budget at several limits between the peaks of `full` and `none`. Where a limit
is below the peak of `none`, a run without the budget has to take `full` (or `selective`, where that fits). The peak is
that of the first steps, in live tensors. For the time, all runs take turns in one process; a ratio is that of a run's
seconds per step to those of `full` in the same round. The weights of all runs must be equal at the end.
"""

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import machine, quartiles, table

from trainapp.config import compose
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.train import loop
from trainapp.train.run import Run

WARM_UP = 4  # steps until a size is proven and memory no longer counted
COMMON = (
    *("train.device=cpu", "train.max_steps=1000000", "train.max_epochs=null", "every.log=null", "every.eval=null"),
    *("every.save=null", "memory.guard=false", "checkpointing=off", "oom.remember=false"),
    *("model=gpt", "data=synthetic_tokens", "data.vocab_size=512", "data.size=256"),
)
SHARES = (0.25, 0.5, 0.75)  # of the way from the peak of `full` to that of `none`


def main() -> None:
    """Print one row per run. The exit code is 1 if weights differ or a peak exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps per run and round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4, help="of 256 tokens, in one micro-batch")
    parser.add_argument("--json", type=Path, help="also write peaks and ratios to this file")
    options = parser.parse_args()
    logging.getLogger("trainapp").setLevel(logging.ERROR)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    case = (
        *(f"model.width={options.width}", f"model.depth={options.depth}", "model.heads=4", "model.context_length=256"),
        *(f"batch.global_size={options.samples}", f"batch.micro_size={options.samples}"),
    )
    modes = ("none", "selective", "full")
    prepared = {mode: prepare(*COMMON, *case, f"activation_checkpointing={mode}") for mode in modes}
    none, selective, full = (run.memory.peak for run in prepared.values())
    limits = {f"{share:.0%} of the way": round(full + share * (none - full)) for share in SHARES}
    for name, limit in (limits | {"at the peak of selective": selective}).items():
        prepared[f"budget, {name}"] = prepare(
            *COMMON, *case, "activation_checkpointing=budget", f"memory.limit={limit}"
        )
    limits = {f"budget, {name}": limit for name, limit in limits.items()} | {
        "budget, at the peak of selective": selective
    }
    ratios = compare(prepared, options.rounds, options.steps)
    print(report(prepared, limits, ratios))
    if options.json:
        peaks = {name: run.memory.peak for name, run in prepared.items()}
        options.json.write_text(json.dumps({"peaks": peaks, "limits": limits, "ratios": ratios}, indent=1))
    same = all(torch.equal(weights(run), weights(prepared["none"])) for run in prepared.values())
    print(f"weights equal bit for bit: {same}")
    for run in prepared.values():
        run.close()
    if not same or any(prepared[name].memory.peak > limit for name, limit in limits.items()):
        raise SystemExit(1)


def prepare(*overrides: str) -> Run:
    """A run after its warm-up."""
    config = compose.from_command_line(overrides, tempfile.mkdtemp(prefix="budget_"))
    run = runner.prepare(config, StopRequest(), SingleRank())
    for _ in range(WARM_UP):
        loop.train_step(run)
    return run


def compare(prepared: dict[str, Run], rounds: int, steps: int) -> dict[str, list[float]]:
    """By run and round, the time of a step relative to that with `full`."""
    ratios: dict[str, list[float]] = {name: [] for name in prepared}
    for number in range(rounds):
        order = list(prepared) if number % 2 == 0 else list(reversed(prepared))
        seconds = {}
        for name in order:
            started = time.perf_counter()
            for _ in range(steps):
                loop.train_step(prepared[name])
            seconds[name] = time.perf_counter() - started
        for name in prepared:
            ratios[name].append(seconds[name] / seconds["full"])
    return ratios


def weights(run: Run) -> torch.Tensor:
    """All parameters."""
    return torch.cat([p.detach().flatten() for p in run.state.model.parameters()])


def report(prepared: dict[str, Run], limits: dict[str, int], ratios: dict[str, list[float]]) -> str:
    """One row per run."""
    rows = []
    for name, run in prepared.items():
        low, middle, high = quartiles(ratios[name])
        values: list[Any] = [mib(limits[name]) if name in limits else "", mib(run.memory.peak)]
        rows.append([name, *values, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{100 * (1 / middle - 1):+.1f}%"])
    return table(["run", "limit MiB", "peak MiB", "time vs full", "quartiles", "speed vs full"], rows)


def mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
