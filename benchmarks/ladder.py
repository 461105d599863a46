"""Whether runs for which no micro-batch fits go on by themselves, and what it costs: six models, ten limits each.

    python benchmarks/ladder.py [--only TEXT] [--json FILE] [--limits 10] [--long]

The limits go from the peak of steps of two micro-batches of one sample, without techniques, down to 5% above the lowest
such peak with any techniques that a run turns on by itself. Every run must end, within its limit, and be equal bit for
bit to a run that has its techniques and sizes from the start; its weights must be equal to rounding to those of a run
without a limit. Below the lowest peak the run must end with one message, as it must with `oom.techniques=none` in the
middle. Printed are the techniques by limit, and which models cannot climb. `--long` also times 200 steps of each
model that climbs, in relation to a run that knows its settings. The exit code is 1 if anything is otherwise.
"""

import contextlib
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import machine, options_of, table, write

SAMPLES = 4
STEPS = 4
BASE = (
    "train.device=cpu", "train.max_epochs=null", "every.log=null", "every.eval=null", "every.save=null",
    "checkpointing=off", "memory.guard=false", "tracker=[]", f"batch.global_size={SAMPLES}", "optimizer=sgd",
)  # fmt: skip
LLAMA = (
    "model.config={model_type: llama, hidden_size: 96, intermediate_size: 256, num_hidden_layers: 4, "
    "num_attention_heads: 4}"
)
TOKENS = ("data=synthetic_tokens", "data.vocab_size=512", "data.size=64", "data.val_size=8")
MODELS = {
    "mlp": ("model=mlp", "data=digits", "model.width=512", "batch.global_size=512"),
    "resnet": (
        "model=resnet", "model.width=8", "model.norm=group", "data=synthetic_images", "data.size=64",
        "data.image_shape=[3,64,64]",
    ),
    "gpt": ("model=gpt", "model.width=96", "model.context_length=256", *TOKENS),
    "Llama, LoRA": ("model=hf", "model.task=causal_lm", LLAMA, "adapter=lora", *TOKENS, "data.context_length=256"),
    "VAE": (
        "model._target_=_ladder_models.VAE", "task._target_=_ladder_models.vae_loss", "data=digits",
        "user_packages=[_ladder_models]", "batch.global_size=512",
    ),
    "LSTM": (
        "model._target_=_ladder_models.LSTM", "user_packages=[_ladder_models]", "task=next_token", *TOKENS,
        "data.context_length=256",
    ),
}  # fmt: skip
CHECKPOINTING = ("", "activation_checkpointing=selective", "activation_checkpointing=full")
CHUNKS = ("", "memory.loss_chunk=auto")
TOLERANCE = 1e-5  # of weights, relative to the largest of their tensor, between micro-batch sizes in fp32


def main() -> None:
    """Print one row per model."""
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="models with this text in their name")
    parser.add_argument("--limits", type=int, default=10, help="the number of limits")
    parser.add_argument("--long", action="store_true", help="also time runs of 200 steps")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    found = []
    for name in MODELS:
        if options.only in name:
            found.append(climbs(name, options.limits, options.long))
            print(found[-1], file=sys.stderr, flush=True)
    print(f"{STEPS} steps, {options.limits} limits; {machine()}:\n\n{report(found)}")
    write(options.json, found)
    sys.exit(int(not all(row["as_said"] for row in found)))


def climbs(name: str, limits: int, is_long: bool) -> dict[str, Any]:
    """Return what became of one model under all limits."""
    overrides = MODELS[name]
    highest, lowest = _peaks(overrides)
    free = _weights(_run(*overrides))
    row: dict[str, Any] = {
        "model": name, "highest": highest, "lowest": lowest, "turned_on": [], "errors": 0, "as_said": True,
        "deviation": 0.0, "time": None,
    }  # fmt: skip
    for number in range(limits):
        share = number / max(1, limits - 1)
        limit = int(highest + share * (1.05 * lowest - highest))
        if limit > highest:  # nothing that the program turns on would help
            continue
        climbed = _run(*overrides, f"memory.limit={limit}")
        turned_on = list(climbed.session.turned_on.settings)
        known = _run(*overrides, *turned_on, schedule=climbed.result.micro_schedule)
        row["turned_on"].append(" ".join(turned_on))
        row["errors"] += climbed.result.oom_restarts
        row["deviation"] = max(row["deviation"], _deviation(_weights(climbed), free))
        is_within = climbed.result.peak_memory_bytes <= limit
        row["as_said"] &= is_within and _deviation(_weights(climbed), _weights(known)) == 0
    row["as_said"] &= row["deviation"] < TOLERANCE
    row["as_said"] &= _ends(*overrides, f"memory.limit={int(0.95 * lowest)}")
    if any(row["turned_on"]):
        middle = f"memory.limit={(highest + lowest) // 2}"
        row["as_said"] &= _ends(*overrides, middle, "oom.techniques=none")
        if is_long:
            row["time"] = _ratio(overrides, middle)
    return row


def _peaks(overrides: tuple[str, ...]) -> tuple[int, int]:
    """Return the peak of two micro-batches of one sample without techniques, and the lowest one with any."""
    from trainapp.errors import UserError

    peaks = []
    for chosen in itertools.product(CHECKPOINTING, CHUNKS):
        settings = [setting for setting in chosen if setting]
        try:
            short = _run(*overrides, "batch.global_size=2", "batch.micro_size=1", "train.max_steps=2", *settings)
        except UserError:  # not with this model
            continue
        peaks.append(short.result.peak_memory_bytes)
    return peaks[0], min(peaks)


def _ratio(overrides: tuple[str, ...], limit: str) -> float:
    """Return the time of a run of 200 steps that climbs, in relation to one that knows techniques and sizes."""
    ratios = []
    for _ in range(3):
        climbed = _run(*overrides, limit, "train.max_steps=200")
        settings = climbed.session.turned_on.settings
        known = _run(*overrides, *settings, "train.max_steps=200", schedule=climbed.result.micro_schedule)
        ratios.append(climbed.seconds / known.seconds)
    return statistics.median(ratios)


class _Run:
    """A run that has ended: its last session, its result, and its seconds."""

    def __init__(self, *overrides: str, schedule: dict[Any, Any] | None = None):
        import dataclasses
        from unittest import mock

        from trainapp.config import compose
        from trainapp.run import runner
        from trainapp.tracking.tracker import Tracker

        attempt = runner.run_until_oom

        def noting(session: Any) -> Any:
            self.session = session
            return attempt(session)

        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(contextlib.redirect_stdout(None))
            stack.enter_context(mock.patch.object(runner, "run_until_oom", noting))
            stack.enter_context(mock.patch.object(Tracker, "queue_picture"))  # half a second each
            steps = (f"train.max_steps={STEPS}",) if not any("max_steps" in text for text in overrides) else ()
            config = compose.from_command_line([*BASE, *steps, *overrides], folder)
            if schedule is not None:
                batch = dataclasses.replace(config.batch, micro_schedule=schedule)
                config = dataclasses.replace(config, batch=batch)
            started = time.monotonic()
            self.result = runner.run(config)
            self.seconds = time.monotonic() - started


_run = _Run


def _ends(*overrides: str) -> bool:
    """Return whether a run ends with a message that memory ran out."""
    from trainapp.errors import OutOfMemory

    try:
        _run(*overrides)
    except OutOfMemory:
        return True
    return False


def _weights(run: _Run) -> list[Any]:
    return [parameter.detach().clone() for parameter in run.session.state.model.parameters()]


def _deviation(ours: list[Any], theirs: list[Any]) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(ours, theirs, strict=True))


def report(found: list[dict[str, Any]]) -> str:
    """Return the table, as Markdown."""
    header = ["model", "peak, MiB", "lowest", "turned on", "errors", "deviation", "time", "as said"]
    rows = []
    for row in found:
        texts = []
        for settings, group in itertools.groupby(row["turned_on"]):
            texts.append(f"{len(list(group))} x {settings or 'nothing'}")
        time_text = "" if row["time"] is None else f"x {row['time']:.2f}"
        cells = [
            row["model"], f"{row['highest'] / 2**20:.1f}", f"{row['lowest'] / 2**20:.1f}",
            ", ".join(texts) or "cannot climb", str(row["errors"]), f"{row['deviation']:.0e}", time_text,
            "yes" if row["as_said"] else "no",
        ]  # fmt: skip
        rows.append(cells)
    return table(header, rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    main()
