"""How often a step whose size is proven waits for the device, as torch's own debug mode counts it.

The mode covers reads of values, copies to pageable memory and the like, not collectives.
"""

import collections
import warnings
from pathlib import Path

import runs
import torch

from trainapp.training import loop
from trainapp.training.session import Session

from .. import jobs
from ..table import Table

STEPS = 5
# (name, model, settings, most waits per step). fp16 reads once whether the gradients overflowed, nonfinite=skip once
# whether count, loss and gradients are finite.
CASES = (
    ("mlp, fp32", "mlp", (), 0),
    ("gpt, fp32", "gpt", (), 0),
    ("gpt, bf16", "gpt", ("precision=bf16",), 0),
    ("resnet, fp32", "resnet", ("model.norm=batch",), 0),
    ("mlp, fp32, weight average", "mlp", ("train.ema=0.9",), 0),
    ("gpt, fp16", "gpt", ("precision=fp16", "precision.initial_scale=256"), 1),
    ("mlp, train.nonfinite=skip", "mlp", ("train.nonfinite=skip",), 1),
)


def check(table: Table, device: str, folder: Path) -> None:
    """One row per case."""
    for number, (name, model, settings, most) in enumerate(CASES):
        check_name = f"waits per step: {name}"
        if device == "cpu":
            table.needs_cuda(check_name)
            continue
        with table.attempt(check_name, f"at most {most}"):
            overrides = jobs.overrides(device, model, "checkpointing=off", "train.max_steps=1000", "every.log=null")
            session = runs.prepare(folder / str(number), *overrides, *settings)
            try:
                waits = waits_of(session)
            finally:
                session.close()
            found = "; ".join(f"{count} x {place}" for place, count in waits.most_common(3))
            per_step = sum(waits.values()) / STEPS
            got = f"{per_step:g}" + (f": {found}" if found else "")
            table.expect(check_name, f"at most {most}", got, per_step <= most)


def waits_of(session: Session) -> collections.Counter[str]:
    """The places in this program, or in torch, at which STEPS steps of a proven size waited."""
    for _ in range(10):
        loop.train_step(session)
        loop.update_weight_average(session)
    if session.sizes.train.is_unproven:
        raise RuntimeError("the size is not proven after 10 steps")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(STEPS):
                loop.train_step(session)
                loop.update_weight_average(session)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return collections.Counter(
        f"{Path(entry.filename).name}:{entry.lineno}" for entry in caught if "synchroniz" in str(entry.message)
    )
