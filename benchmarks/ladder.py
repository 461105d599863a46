"""The ladder: peak memory and relative time of every lever, alone and stacked, paired with the run without it.

    python benchmarks/ladder.py [--models gpt,resnet] [--rounds 7] [--steps 2] [--scale 1.0] [--json FILE]

The levers are those of `trainapp.techniques.catalogue` that a single process can set. The peak is that of two steps,
in live tensors, with the optimizer's state allocated. For the time, some runs with a lever and one without take turns
in one process; a ratio is that of their seconds per step in the same round. With one thread these are seconds of the
thread, which other processes disturb less. Stacks add one lever after the other.

Beside each figure stands what the plan predicts, and by how much it is off.
"""

import argparse
import concurrent.futures
import json
import logging
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import keep_freed_memory, machine, quartiles, table

from trainapp.assembly.components import load_components
from trainapp.config import compose
from trainapp.config.schema import Config
from trainapp.parallel.ranks import SingleRank
from trainapp.planning.sizes import Planner
from trainapp.planning.step_time import Speeds
from trainapp.planning.workload import given_size
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.techniques.catalogue import TECHNIQUES
from trainapp.techniques.technique import Situation, Technique
from trainapp.train import loop
from trainapp.train.run import Run

WARM_UP = 4  # steps until a size is proven and memory no longer counted
AT_ONCE = 7  # runs that take turns with the one without a lever
SAMPLES = 16
COMMON = (
    "train.device=cpu",
    "train.max_steps=1000000",
    "train.max_epochs=null",
    "every.log=null",
    "every.eval=null",
    "every.save=null",
    "memory.guard=false",
    "checkpointing=off",
    f"batch.global_size={SAMPLES}",
    f"batch.micro_size={SAMPLES}",
)
# What is added one after the other, cheapest first.
STACKS = {
    "gpt": (
        "precision=bf16",
        "memory.loss_chunk=auto",
        "activation_checkpointing=full",
        "optimizer=adamw_bf16",
        "precision=bf16_pure",
        "batch.micro_size=1",
    ),
    "resnet": ("precision=bf16", "activation_checkpointing=full", "optimizer=adamw_bf16", "batch.micro_size=2"),
}


def case(model: str, scale: float) -> tuple[str, ...]:
    """The overrides of a model, its sizes multiplied by `scale`."""
    width = max(2, round(8 * scale)) * 16
    if model == "gpt":
        return (
            *("model=gpt", f"model.depth={max(2, round(6 * scale))}", f"model.width={width}", "model.heads=4"),
            f"model.context_length={max(16, round(128 * scale))}",
            *("data=synthetic_tokens", f"data.vocab_size={max(64, round(8192 * scale))}", "data.size=256"),
        )
    image = max(8, round(32 * scale))
    shape = f"data.image_shape=[3,{image},{image}]"
    return ("model=resnet", f"model.width={width // 4}", "data=synthetic_images", shape)


def main() -> None:
    """Print two tables per model: each lever alone, and the stacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,resnet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per run and round")
    parser.add_argument("--scale", type=float, default=1.0, help="of depth, widths, lengths, vocabulary and images")
    parser.add_argument("--json", type=Path, help="also write peaks and ratios to this file")
    options = parser.parse_args()
    logging.getLogger("trainapp").setLevel(logging.ERROR)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    found: dict[str, Any] = {}
    for model in options.models.split(","):
        overrides = (*COMMON, *case(model, options.scale))
        found[model] = {"levers": {}, "stacks": {}}
        print(f"\n{model}: {' '.join(case(model, options.scale))}, {SAMPLES} samples, AdamW, fp32")
        kinds = {"levers": alone(overrides), "stacks": stacked(STACKS[model])}
        predicted = predict_elsewhere(overrides, [setting for settings in kinds.values() for setting in settings])
        for kind, settings in kinds.items():
            for first in range(0, len(settings), AT_ONCE):
                measured = measure(overrides, settings[first : first + AT_ONCE], options)
                found[model][kind] |= {setting: predicted[setting] | own for setting, own in measured.items()}
            print(f"\n{report(found[model][kind])}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def alone(overrides: tuple[str, ...]) -> list[str]:
    """The settings of all levers that apply here and are not in force."""
    config = configure(overrides)
    run = prepare(config)
    here = Situation(config, run.state.model, True)
    run.close()
    return [lever.setting for lever in TECHNIQUES if is_for_one_process(lever) and lever.suits(here)] + [
        "batch.micro_size=4"
    ]


def is_for_one_process(lever: Technique) -> bool:
    """Whether it is a fixed setting, in force in no default run, and not about ranks."""
    return bool(lever.changes) and not lever.is_default and not lever.setting.startswith("parallel")


def stacked(settings: tuple[str, ...]) -> list[str]:
    """One setting, then two, ... then all of them."""
    return [" ".join(settings[: count + 1]) for count in range(len(settings))]


def measure(overrides: tuple[str, ...], settings: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By setting, peaks in bytes without and with it, and the ratio of times by round."""
    plain, *changed = runs = [prepare(configure((*overrides, *setting.split()))) for setting in ("", *settings)]
    ratios: dict[str, list[float]] = {setting: [] for setting in settings}
    for run in runs:
        advance(run, WARM_UP)
    for number in range(options.rounds):
        order = runs if number % 2 == 0 else runs[::-1]
        seconds = {id(run): advance(run, options.steps) for run in order}
        for setting, run in zip(settings, changed, strict=True):
            ratios[setting].append(seconds[id(run)] / seconds[id(plain)])
    for run in runs:
        run.close()
    return {
        setting: {"plain": plain.memory.peak, "peak": run.memory.peak, "ratios": ratios[setting]}
        for setting, run in zip(settings, changed, strict=True)
    }


def predict_elsewhere(overrides: tuple[str, ...], settings: list[str]) -> dict[str, dict[str, float]]:
    """`predict` in a process of its own, as the program does."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(predict, overrides, settings).result()


def predict(overrides: tuple[str, ...], settings: list[str]) -> dict[str, dict[str, float]]:
    """By setting, the peak in bytes and the relative time that the plan predicts."""
    config = configure(overrides)
    components, speeds = load_components(config), Speeds(torch.device("cpu"))

    def peak_and_seconds(setting: str) -> tuple[int, float]:
        planner = Planner(configure((*overrides, *setting.split())), components)
        planner.counts_work = True
        traced = planner.at(given_size(planner.config, planner.workload.share), 0)
        return traced.training.total, traced.work.seconds(speeds)

    plain = peak_and_seconds("")[1]
    found = {setting: peak_and_seconds(setting) for setting in settings}
    return {
        setting: {"predicted_peak": peak, "predicted_time": seconds / plain}
        for setting, (peak, seconds) in found.items()
    }


def configure(overrides: tuple[str, ...]) -> Config:
    """The configuration of these overrides, in a folder of its own. The last of several values of a setting holds."""
    last = {override.partition("=")[0]: override for override in overrides}
    return compose.from_command_line(last.values(), tempfile.mkdtemp(prefix="ladder_"))


def prepare(config: Config) -> Run:
    """A run that is ready for its first step."""
    return runner.prepare(config, StopRequest(), SingleRank())


def advance(run: Run, steps: int) -> float:
    """Train so many steps. Returns the seconds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(steps):
        loop.train_step(run)
    return clock() - started


def report(found: dict[str, dict[str, Any]]) -> str:
    """One row per setting."""
    rows = []
    for setting, values in found.items():
        low, middle, high = quartiles(values["ratios"])
        sizes = [mib(values["plain"]), mib(values["peak"]), f"{values['plain'] / values['peak']:.2f}x"]
        off = f"{values['predicted_peak'] / values['peak'] - 1:+.3%}"
        times = [f"{middle:.2f}", f"{low:.2f} - {high:.2f}", f"{values['predicted_time']:.2f}"]
        rows.append([f"`{setting}`", *sizes, off, *times, f"{values['predicted_time'] / middle - 1:+.0%}"])
    header = ["setting", "MiB without", "MiB with", "lower by", "plan off by"]
    return table([*header, "relative time", "quartiles", "planned", "off by"], rows)


def mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:.1f}"


if __name__ == "__main__":
    keep_freed_memory()
    main()
