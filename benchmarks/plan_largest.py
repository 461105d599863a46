"""The largest micro-batch that fits a limit: planned, tried for real, and found by runs that meet the limit.

    python benchmarks/plan_largest.py [--only TEXT] [--every N] [--json FILE]

For each (configuration, limit) pair the size N is planned, on tensors without data. It is right if three real steps
with micro-batches of N stay within the limit, and with N + 1 run out of memory. Limits lie between what the smallest
and what the whole batch needs, on the CPU, where they are exact. The exit code is 1 if fewer than 95% of the pairs are
right, or one took more than 6 traces.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import machine, table

# Three steps: an optimizer may create its state in the first.
BASE = (
    "train.device=cpu", "train.max_epochs=null", "train.max_steps=3", "every.log=1", "every.eval=null",
    "every.save=null", "checkpointing=off", "memory.guard=false",
)  # fmt: skip
SHARES = (0.15, 0.45, 0.8)  # where the limits lie between the smallest and the largest peak
MLP = ("model=mlp", "data=digits", "model.width=64", "batch.global_size=480")
GPT = (
    "model=gpt", "model.depth=2", "model.width=32", "model.heads=2", "model.context_length=32", "data=synthetic_tokens",
    "data.vocab_size=256", "data.size=200", "data.val_size=16", "batch.global_size=40",
)  # fmt: skip
RESNET = ("model=resnet", "model.width=8", "data=digits", "batch.global_size=48")
NADAM = ("optimizer._target_=torch.optim.NAdam", "~optimizer.betas", "~optimizer.eps")


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and overrides."""
    for more in (
        (), ("precision=bf16",), ("precision=fp16",), ("optimizer=sgd", "train.ema=0.9"), ("data.augment=true",),
    ):  # fmt: skip
        yield "mlp", (*MLP, *more)
    for more in (
        (), ("precision=bf16",), ("activation_checkpointing=full",),
        ("activation_checkpointing=selective", "precision=bf16"), NADAM, ("optimizer=adafactor",),
        ("memory.loss_chunk=auto",), ("model.dropout=0.1", "batch.global_size=25"),
    ):  # fmt: skip
        yield "gpt", (*GPT, *more)
    for more in (("model.norm=group",), ("precision=bf16",), ("activation_checkpointing=full", "optimizer=sgd")):
        yield "resnet", (*RESNET, *more)


def ends(overrides: tuple[str, ...]) -> tuple[int, int]:
    """The traced peaks of the smallest micro-batch and of the whole batch."""
    from trainapp.assembly.components import load_components
    from trainapp.config import compose
    from trainapp.planning.sizes import Planner

    config = compose.from_command_line([*BASE, *overrides])
    planner = Planner(config, load_components(config))
    whole = planner.at(planner.workload.share, 0)
    smallest = planner.at(whole.smallest, 0)
    assert whole.training is not None, "traced without training"
    assert smallest.training is not None, "traced without training"
    return smallest.training.total, whole.training.total


def planned(overrides: tuple[str, ...]) -> dict[str, Any]:
    """The search alone, in this process, which is used for nothing else."""
    from trainapp.config import compose
    from trainapp.planning import planner

    return planner.plan(compose.from_command_line([*BASE, *overrides]), only=("training",))[0]


def fits(overrides: tuple[str, ...], size: int) -> bool:
    """Whether real steps with micro-batches of `size` stay within the limit."""
    import torch

    try:
        result_of(overrides, f"batch.micro_size={size}", "oom=off")
    except torch.OutOfMemoryError:
        return False
    return True


def result_of(*overrides: Any) -> Any:
    """The result of a run in a directory that is removed."""
    import logging

    from trainapp.config import compose
    from trainapp.run import runner

    logging.disable(logging.WARNING)
    first, *more = overrides
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        return runner.run(compose.from_command_line([*BASE, *first, *more], folder))


def compared(family: str, overrides: tuple[str, ...], limit: int, planning: Any, training: Any) -> dict:
    """One pair."""
    limited = (*overrides, f"memory.limit={limit}")
    facts = planning.submit(planned, limited).result()
    size = facts.get("largest_micro_size", 0)
    is_right = size > 0 and training.submit(fits, limited, size).result()
    is_right = is_right and not training.submit(fits, limited, size + 1).result()
    return {
        "family": family,
        "overrides": limited,
        "planned": size,
        "certainty": facts["certainty"],
        "is_right": is_right,
        "traces": facts.get("traces", 0),
        "seconds": facts.get("seconds", 0.0),
    }


def main() -> None:
    """Print one row per family, and one per pair that is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations with this text in their overrides")
    parser.add_argument("--every", type=int, default=1, help="only every N-th pair")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: list[dict[str, Any]] = []
    pool = concurrent.futures.ProcessPoolExecutor
    with pool(1, context) as planning, pool(1, context) as training:
        chosen = [case for case in cases() if options.only in " ".join(case[1])]
        pairs = [(*case, share) for case in chosen for share in SHARES][:: options.every]
        bounds: dict[tuple[str, ...], tuple[int, int]] = {}
        for family, overrides, share in pairs:
            if overrides not in bounds:
                bounds[overrides] = planning.submit(ends, overrides).result()
            low, high = bounds[overrides]
            limit = int(low + share * (high - low))
            found.append(compared(family, overrides, limit, planning, training))
            if sys.stderr.isatty():
                print(f"\r{len(found)} of {len(pairs)}", end="", file=sys.stderr)
    print(machine())
    print(report(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(int(not is_good(found)))


def is_good(found: list[dict[str, Any]]) -> bool:
    """Whether the figures are what the documentation says."""
    right = sum(one["is_right"] for one in found) >= 0.95 * len(found)
    return right and all(one["traces"] <= 6 for one in found)


def report(found: list[dict[str, Any]]) -> str:
    """The tables."""
    families = [*dict.fromkeys(one["family"] for one in found)]
    rows = [_row(name, [one for one in found if one["family"] == name]) for name in families]
    if len(families) > 1:
        rows.append(_row("all", found))
    text = table(["model", "pairs", "right", "traces: median, most"], rows)
    wrong = [
        [one["family"], " ".join(one["overrides"][1:]), one["certainty"], str(one["planned"])]
        for one in found
        if not one["is_right"]
    ]
    if wrong:
        text += "\n\n" + table(["model", "not right", "certainty", "planned"], wrong)
    return text


def _row(name: str, own: list[dict[str, Any]]) -> list[str]:
    cells = [name, str(len(own)), str(sum(one["is_right"] for one in own))]
    cells.append(_both([one["traces"] for one in own], max))
    return cells


def _both(values: list[float], worst: Any) -> str:
    if not values:
        return ""
    middle, extreme = statistics.median(values), worst(values)
    return ", ".join(f"{value:g}" if value == int(value) else f"{value:.2f}" for value in (middle, extreme))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TRAINAPP_CACHE", tempfile.mkdtemp())
    main()
