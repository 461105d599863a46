"""The same job under the same memory limit, with three trainers: what does an out-of-memory error cost?

    python benchmarks/oom_recovery.py [--quick] [--json FILE]

Accelerate and the Transformers Trainer take part where they are installed (`pip install accelerate transformers`);
they are no dependencies. Every trainer runs in a process of its own, once without a limit and once with it; all of them
inside the same counter of live tensors, so that times compare and the peak is known. Then the second table: what the
recovery of `python -m trainapp` costs beside a run that was started at the micro-batch where the other ended.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _common import machine, table

HERE = Path(__file__).resolve().parent
MIB = 2**20
TRAINERS = ("trainapp", "accelerate", "transformers")
LEARNING_RATE = 1e-3
# Long sequences come in steps 8, 11, 18 and 20 of 20 (quick: 2 and 3 of 5). Only they do not fit.
FULL = {"size": 640, "val_size": 128, "global_size": 32, "limit": 64 * MIB, "context_length": 256, "rarity": 160}
QUICK = FULL | {"size": 80, "val_size": 16, "global_size": 16, "limit": 20 * MIB, "context_length": 128, "rarity": 40}
MODEL = {"depth": 2, "width": 64, "heads": 4}


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny job, for tests")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs for the second table; 0 leaves it out")
    parser.add_argument("--worker", choices=(*TRAINERS, "overhead"), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[options.worker](options.job)))
        return
    job = QUICK if options.quick else FULL
    rows = [compare(trainer, job) for trainer in TRAINERS]
    print(recovery_table(rows, job))
    found: dict[str, Any] = {"job": job, "trainers": rows}
    if options.repeats and not options.quick:
        found["overhead"] = [overhead(name, options.repeats) for name in OVERHEAD]
        print(overhead_table(found["overhead"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def compare(trainer: str, job: dict[str, int]) -> dict[str, Any]:
    """The row of one trainer: its limited run, held against its own run without a limit."""
    packages = {"transformers": ("transformers", "accelerate"), "accelerate": ("accelerate",)}.get(trainer, ())
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return {"trainer": trainer, "missing": f"pip install {' '.join(missing)}"}
    version = importlib.metadata.version(trainer)
    free, limited = (in_process(trainer, job | {"limit": limit}) for limit in (None, job["limit"]))
    return {"trainer": trainer, "version": version, **limited, "undisturbed": free}


def in_process(worker: str, job: dict[str, Any]) -> dict[str, Any]:
    """The worker's findings, from a process of its own: no cache, imports and memory shared with the next."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TRAINAPP_CACHE": cache, "TQDM_DISABLE": "1"}
        command = [sys.executable, str(HERE / "oom_recovery.py"), "--worker", worker, "--job", json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{worker} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# --- The three trainers. Imports are late: each process needs its own only. -----------------------------------------


def with_trainapp(job: dict[str, Any]) -> dict[str, Any]:
    """`python -m trainapp`, called in this process to count its steps."""
    import oom_job

    ledger = oom_job.ledger()
    with tempfile.TemporaryDirectory() as folder:
        config = compose(folder, overrides(job))
        from trainapp.launch.launch import launch

        started = time.monotonic()
        with oom_job.Limit() as counter:  # counts only; `memory.limit` enforces
            launch(config)
        result = result_of(folder)
    reported, loss, restarts = result["steps"], result["objective"], result["oom_restarts"]
    return findings(ledger, job, reported, loss, started, counter.peak, restarts)


def overrides(job: dict[str, Any]) -> list[str]:
    """The job as arguments of `python -m trainapp`, where `oom_job` can be imported."""
    return [
        "data=synthetic_tokens",
        "data._target_=oom_job.LongTail",
        *(f"++data.{name}={job[name]}" for name in ("size", "val_size", "context_length", "rarity")),
        "model=gpt",
        f"model.context_length={job['context_length']}",
        *(f"model.{name}={value}" for name, value in MODEL.items()),
        "task=oom_job.next_token",
        "user_packages=[oom_job]",
        "train.max_epochs=1",
        "schedule=constant",
        f"batch.global_size={job['global_size']}",
        f"optimizer.lr={LEARNING_RATE}",
        "optimizer.weight_decay=0",
        f"memory.limit={job['limit'] or 'null'}",
        "checkpointing.save=false",
    ]


def with_accelerate(job: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's decorator around the training function of a plain script."""
    import oom_job
    import torch
    from accelerate.utils import find_executable_batch_size

    from trainapp.data.sampler import epoch_order

    ledger, tries = oom_job.ledger(), Counter()
    train_data, val_data = datasets(job)

    @find_executable_batch_size(starting_batch_size=job["global_size"])
    def train(batch_size):
        tries["train"] += 1
        model = oom_job.build_model(train_data.spec, **MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0, fused=True)
        order, reported = epoch_order(0, 0, len(train_data)), 0
        for start in range(0, len(order), batch_size):
            loss_sum, count, _ = oom_job.next_token(model, train_data.__getitems__(order[start : start + batch_size]))
            (loss_sum / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            reported += 1
        return reported, oom_job.evaluate(model, val_data, 2 * batch_size)

    started = time.monotonic()
    with oom_job.Limit(job["limit"]) as counter:
        reported, loss = train()
    return findings(ledger, job, reported, loss, started, counter.peak, tries["train"] - 1)


def with_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """The Transformers Trainer with auto_find_batch_size=True."""
    import oom_job
    from torch.utils.data import Sampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from trainapp.data.sampler import epoch_order

    ledger, tries = oom_job.ledger(), Counter()
    train_data, val_data = datasets(job)

    class SameOrder(Sampler):
        def __iter__(self):
            return iter(epoch_order(0, 0, len(train_data)))

        def __len__(self):
            return len(train_data)

    class Tries(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            tries["train"] += 1

    class SameLoss(Trainer):
        def _get_train_sampler(self, *args):
            return SameOrder()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss_sum, count, _ = oom_job.next_token(model, inputs)
            return loss_sum / count

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, oom_job.Limit(job["limit"]) as counter:
        arguments = TrainingArguments(
            output_dir=folder,
            auto_find_batch_size=True,
            per_device_train_batch_size=job["global_size"],
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_epsilon=1e-8,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
        )
        model = oom_job.build_model(train_data.spec, **MODEL)
        trainer = SameLoss(
            model, arguments, data_collator=lambda batch: batch, train_dataset=train_data, callbacks=[Tries()]
        )
        trainer.train()
        loss = oom_job.evaluate(model, val_data, 2 * trainer._train_batch_size)
    reported = trainer.state.global_step
    return findings(ledger, job, reported, loss, started, counter.peak, tries["train"] - 1)


def findings(ledger, job, reported, loss, started, peak, failures) -> dict[str, Any]:
    """What a run did, by the ledger; what it says that it did; seconds and bytes."""
    survivor = ledger.steps[-1][0]  # Accelerate's function builds a new model for each try
    kept = [samples for model, samples in ledger.steps if model == survivor]
    seen = Counter(sample for samples in kept for sample in samples)
    return {
        "out_of_memory": failures,
        "steps_done": len(ledger.steps),
        "steps_in_weights": len(kept),
        "steps_reported": reported,
        "samples_trained": sum(len(samples) for _, samples in ledger.steps),
        "samples_in_weights": seen.total(),
        "repeated": sum(1 for times in seen.values() if times > 1),
        "skipped": job["size"] - len(seen),
        "global_batch": list(dict.fromkeys(len(samples) for samples in kept[:-1])),  # the last may be partial
        "eval_loss": loss,
        "seconds": time.monotonic() - started,
        "peak": peak,
    }


def datasets(job: dict[str, Any]) -> tuple[Any, Any]:
    """Training and validation split, as trainapp builds them."""
    import oom_job

    names = ("size", "val_size", "context_length", "rarity")
    return tuple(oom_job.LongTail(split, 0, **{name: job[name] for name in names}) for split in ("train", "val"))


def result_of(folder: str) -> dict[str, Any]:
    """What a run of trainapp says of itself."""
    return json.loads(Path(folder, "result.json").read_text())


def compose(folder: str, *overrides: list[str]) -> Any:
    """The configuration of a command line."""
    from trainapp.config import compose

    return compose.from_command_line([text for part in overrides for text in part], folder)


def recovery_table(rows: list[dict[str, Any]], job: dict[str, Any]) -> str:
    """The first table, as Markdown."""
    header = [
        "trainer", "OOM errors", "optimizer steps: done / kept / reported", "samples trained / in the epoch",
        "repeated, skipped", "global batch", "eval loss", "its change", "peak MiB", "seconds", "without a limit",
    ]  # fmt: skip
    cells = []
    for row in rows:
        if "missing" in row:
            cells.append([row["trainer"], f"not installed: {row['missing']}", *[""] * (len(header) - 2)])
            continue
        free, batches = row["undisturbed"], row["global_batch"]
        cells.append([
            f"{row['trainer']} {row['version']}",
            str(row["out_of_memory"]),
            f"{row['steps_done']} / {row['steps_in_weights']} / {row['steps_reported']}",
            f"{row['samples_trained']} / {job['size']}",
            f"{row['repeated']}, {row['skipped']}",
            str(batches[0]) if len(batches) == 1 else f"{batches[0]} down to {batches[-1]}",
            f"{row['eval_loss']:.4f}",
            f"{row['eval_loss'] - free['eval_loss']:+.4f}",
            f"{row['peak'] / MIB:.1f}",
            f"{row['seconds']:.1f}",
            f"{free['seconds']:.1f}",
        ])  # fmt: skip
    heading = (
        f"One epoch of {job['size']} samples, global batch {job['global_size']}, limit {job['limit'] / MIB:.0f} MiB "
        f"({machine()}):"
    )
    return f"{heading}\n\n{table(header, cells)}\n"


# --- The second table: the whole cost of recovering. ----------------------------------------------------------------

_COMMON = ["checkpointing.save=false", "oom.remember=false", "every.eval=null", "train.max_epochs=null"]
OVERHEAD = {
    "resnet": ["model=resnet", "model.width=16", "data=synthetic_images", "memory.limit=48MiB", "train.max_steps=60"],
    "gpt": [
        "model=gpt",
        "model.depth=2",
        "model.width=64",
        "data=synthetic_tokens",
        "memory.limit=48MiB",
        "train.max_steps=60",
    ],
}


def run_once(job: dict[str, Any]) -> dict[str, Any]:
    """One run of trainapp: its time, the micro-batch where it ended, and the time of each attempt that failed.

    Times are `[seconds on the wall, seconds of processor]`.
    """
    from trainapp.train import loop

    failed, train_step = [], loop.train_step

    def timed(*arguments):
        started = _clocks()
        try:
            train_step(*arguments)
        except Exception:
            failed.append(_since(started))
            raise

    loop.train_step = timed
    with tempfile.TemporaryDirectory() as folder:
        config = compose(folder, OVERHEAD[job["name"]], _COMMON, job["overrides"])
        from trainapp.launch.launch import launch

        started = _clocks()
        launch(config)
        total, result = _since(started), result_of(folder)
    return {"total": total, "failed": failed, "micro_size": result["micro_size"], "sizes": result["micro_schedule"]}


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def _since(started: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(_clocks(), started, strict=True)]


def overhead(name: str, repeats: int) -> dict[str, Any]:
    """Pairs of runs, one after the other: one that has to find its micro-batch, one that starts where it ended."""
    pairs = []
    for _ in range(repeats):
        found = in_process("overhead", {"name": name, "overrides": []})
        known = [f"batch.micro_size={found['micro_size']}", "oom.grow=false"]
        pairs.append((found, in_process("overhead", {"name": name, "overrides": known})))
    return {"name": name, "pairs": pairs}


def ratios(row: dict[str, Any], clock: int) -> list[float]:
    """Of each pair: the run that had to find its size, over the other one and the failed attempts together."""
    return [
        found["total"][clock] / (known["total"][clock] + sum(attempt[clock] for attempt in found["failed"]))
        for found, known in row["pairs"]
    ]


def overhead_table(rows: list[dict[str, Any]]) -> str:
    """The second table, as Markdown: medians over the pairs, and their range."""
    header = ["job", "micro-batch from step", "OOM errors", "s, found", "s, known", "s, failed attempts",
              "ratio by the clock", "ratio by processor time"]  # fmt: skip
    cells = []
    for row in rows:
        first = row["pairs"][0][0]
        sizes = ", ".join(f"{size} from {step}" for step, size in first["sizes"].items())
        found, known = (statistics.median(pair[i]["total"][0] for pair in row["pairs"]) for i in (0, 1))
        failed = statistics.median(sum(attempt[0] for attempt in pair[0]["failed"]) for pair in row["pairs"])
        seconds = [f"{value:.2f}" for value in (found, known, failed)]
        spreads = [_spread(ratios(row, clock)) for clock in (0, 1)]
        cells.append([row["name"], sizes, str(len(first["failed"])), *seconds, *spreads])
    return f"The whole of a run that had to find its size ({machine()}):\n\n{table(header, cells)}\n"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


WORKERS = {
    "trainapp": with_trainapp,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
    "overhead": run_once,
}

if __name__ == "__main__":
    main()
