"""The cost of out-of-memory errors: the same training run under the same memory limit, with three trainers.

    python benchmarks/other_trainers.py [--quick] [--json FILE]

Accelerate and the Transformers Trainer are included if installed (`pip install accelerate transformers`); they are not
dependencies. Each trainer runs in its own process, once without the limit and once with it, always inside the same
counter of live tensors, so that times are comparable and the peak is known.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _common import machine, options_of, table, write

HERE = Path(__file__).resolve().parent
MIB = 2**20
LEARNING_RATE = 1e-3
# Long sequences come in steps 8, 11, 18 and 20 of 20 (quick: 2 and 3 of 5). Only they do not fit.
FULL = {"size": 640, "val_size": 128, "global_size": 32, "limit": 64 * MIB, "context_length": 256, "rarity": 160}
QUICK = FULL | {"size": 80, "val_size": 16, "global_size": 16, "limit": 20 * MIB, "context_length": 128, "rarity": 40}
MODEL = {"depth": 2, "width": 64, "heads": 4}


def main() -> None:
    """Run everything and print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny workload, for tests")
    parser.add_argument("--worker", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(TRAINERS[options.worker](options.job)))
        return
    job = QUICK if options.quick else FULL
    rows = [compare(trainer, job) for trainer in TRAINERS]
    print(report(rows, job))
    write(options.json, {"job": job, "trainers": rows})


def compare(trainer: str, job: dict[str, int]) -> dict[str, Any]:
    """One trainer's row: its run with the limit, and its own run without."""
    packages = ("transformers", "accelerate") if trainer == "transformers" else (trainer,)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return {"trainer": trainer, "missing": f"pip install {' '.join(missing)}"}
    version = importlib.metadata.version(trainer)
    free, limited = (in_process(trainer, job | {"limit": limit}) for limit in (None, job["limit"]))
    return {"trainer": trainer, "version": version, **limited, "undisturbed": free}


def in_process(worker: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a worker in its own process, so that workers share no cache, imports or memory. Returns its findings."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TRAINAPP_CACHE": cache, "TQDM_DISABLE": "1"}
        command = [sys.executable, str(HERE / "other_trainers.py"), "--worker", worker, "--job", json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{worker} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# --- The three trainers. Late imports: each process needs only its own. ----------------------------------------------


def with_trainapp(job: dict[str, Any]) -> dict[str, Any]:
    """`python -m trainapp`, run in this process so that its steps can be counted."""
    import oom_job

    draw_record = oom_job.draw_record()
    with tempfile.TemporaryDirectory() as folder:
        from trainapp.config import compose
        from trainapp.launch.launch import launch

        config = compose.from_command_line(overrides(job), folder)
        started = time.monotonic()
        with oom_job.Limit() as counter:  # counts only; `memory.limit` enforces
            launch(config)
        result = json.loads(Path(folder, "result.json").read_text())
    reported, loss, restarts = result["steps"], result["objective"], result["oom_restarts"]
    return findings(draw_record, job, reported, loss, started, counter.peak, restarts)


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
        "train.check_loss=false",  # whose trials would count as steps
        f"batch.global_size={job['global_size']}",
        f"optimizer.lr={LEARNING_RATE}",
        "optimizer.weight_decay=0",
        f"memory.limit={job['limit'] or 'null'}",
        "checkpointing.save=false",
    ]


def with_accelerate(job: dict[str, Any]) -> dict[str, Any]:
    """A plain script whose training function has Accelerate's decorator."""
    import oom_job
    import torch
    from accelerate.utils import find_executable_batch_size

    from trainapp.data.sampler import Permutation

    draw_record, tries = oom_job.draw_record(), Counter()
    train_data, val_data = datasets(job)

    @find_executable_batch_size(starting_batch_size=job["global_size"])
    def train(batch_size):
        tries["train"] += 1
        model = oom_job.build_model(train_data.spec, **MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0, fused=True)
        order, reported = Permutation(0, len(train_data)).indices(0, 0, len(train_data)), 0
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
    return findings(draw_record, job, reported, loss, started, counter.peak, tries["train"] - 1)


def with_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """The Transformers Trainer with auto_find_batch_size=True."""
    import oom_job
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from trainapp.data.sampler import Permutation

    draw_record, tries = oom_job.draw_record(), Counter()
    train_data, val_data = datasets(job)

    class Tries(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            tries["train"] += 1

    class SameLoss(Trainer):
        def _get_train_sampler(self, *args):
            return Permutation(0, len(train_data)).indices(0, 0, len(train_data))

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
    return findings(draw_record, job, reported, loss, started, counter.peak, tries["train"] - 1)


def findings(draw_record, job, reported, loss, started, peak, failures) -> dict[str, Any]:
    """What a run did according to the draw_record, what it reported, and its time and peak (seconds, bytes)."""
    survivor = draw_record.steps[-1][0]  # under Accelerate, each attempt builds a new model
    kept = [samples for model, samples in draw_record.steps if model == survivor]
    seen = Counter(sample for samples in kept for sample in samples)
    return {
        "out_of_memory": failures,
        "steps_done": len(draw_record.steps),
        "steps_in_weights": len(kept),
        "steps_reported": reported,
        "samples_trained": sum(len(samples) for _, samples in draw_record.steps),
        "samples_in_weights": seen.total(),
        "repeated": sum(1 for times in seen.values() if times > 1),
        "skipped": job["size"] - len(seen),
        "global_batch": list(dict.fromkeys(len(samples) for samples in kept[:-1])),  # the last may be partial
        "eval_loss": loss,
        "seconds": time.monotonic() - started,
        "peak": peak,
    }


def datasets(job: dict[str, Any]) -> tuple[Any, Any]:
    """The training and validation splits, as trainapp builds them."""
    import oom_job

    names = ("size", "val_size", "context_length", "rarity")
    return tuple(oom_job.LongTail(split, 0, **{name: job[name] for name in names}) for split in ("train", "val"))


def report(rows: list[dict[str, Any]], job: dict[str, Any]) -> str:
    """The table, as Markdown."""
    header = [
        "trainer", "OOM errors", "optimizer steps: done / kept / reported", "samples trained / in the epoch",
        "repeated, skipped", "global batch", "eval loss", "change", "peak MiB", "seconds", "seconds, no limit",
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
    workload = f"{job['size']} samples, global batch {job['global_size']}, limit {job['limit'] / MIB:.0f} MiB"
    return f"One epoch of {workload} ({machine()}):\n\n{table(header, cells)}\n"


TRAINERS = {"trainapp": with_trainapp, "accelerate": with_accelerate, "transformers": with_transformers}

if __name__ == "__main__":
    main()
