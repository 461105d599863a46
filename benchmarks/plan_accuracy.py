"""The plan's peak against the measured one, for many configurations of trainapp's own models.

    python benchmarks/plan_accuracy.py [--foreign | --large] [--only TEXT] [--json FILE]

Each configuration is planned in one process (traced or, where that fails, measured) and run for real in another: three
optimizer steps with every step logged. Peaks are live tensor bytes on the CPU. The exit code is 1 if fewer than 95% are
within 1%; of --foreign, models that are not trainapp's own, if fewer than 90% are within 3%, or one is outside of its
margin. --large only times the plan of an 8B Llama with LoRA and all techniques; the exit code is 1 above 120 s.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _foreign
from _common import machine, options_of, table, write

BASE = (
    "train.device=cpu", "train.max_epochs=null", "train.max_steps=3", "every.log=1", "every.eval=null",
    "every.save=null", "checkpointing=off", "oom.grow=false", "memory.guard=false", "memory.limit=null",
    "plan.techniques=false", "train.check_loss=false",  # some foreign losses are means of a whole batch
)  # fmt: skip
STEPS = 3
MLP = ("model=mlp", "data=digits", "batch.global_size=64")
GPT = (
    "model=gpt", "model.depth=2", "model.width=64", "model.context_length=64", "data=synthetic_tokens",
    "data.vocab_size=512", "data.size=200", "data.val_size=64", "batch.global_size=16",
)  # fmt: skip
RESNET = (
    "model=resnet", "model.width=8", "data=synthetic_images", "data.size=200", "data.val_size=64",
    "batch.global_size=16",
)  # fmt: skip
LARGE = (
    "model=hf", "model.task=causal_lm", "adapter=lora", "precision=bf16", "data=synthetic_tokens",
    "model.config={model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, "
    "num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192}",
    "data.vocab_size=128256", "data.context_length=2048", "data.size=64", "data.val_size=8", "batch.global_size=16",
    "memory.limit=80GiB", "plan.techniques=true",
)  # fmt: skip
LARGE_SECONDS = 120
OPTIMIZERS = ("Adagrad", "Adadelta", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and overrides."""
    for precision in ("fp32", "bf16", "fp16"):
        for micro in (64, 16, 5):
            yield "mlp", (*MLP, f"precision={precision}", f"batch.micro_size={micro}")
        yield "mlp", (*MLP, f"precision={precision}", "model.width=1024", "train.ema=0.9")
    yield "mlp", (*MLP, "optimizer=sgd")
    yield "mlp", (*MLP, "data.augment=true", "model.dropout=0.1")
    for precision in ("fp32", "bf16", "fp16"):
        for mode in ("none", "selective", "full"):
            yield "gpt", (*GPT, f"precision={precision}", f"activation_checkpointing={mode}")
        for micro in (8, 4, 1):
            yield "gpt", (*GPT, f"precision={precision}", f"batch.micro_size={micro}")
    for name in OPTIMIZERS:
        off = ("~optimizer.betas", "~optimizer.eps")
        yield "gpt", (*GPT, *off, f"optimizer._target_=torch.optim.{name}", "batch.micro_size=4")
    for more in (
        ("model.tie_embeddings=false",), ("model.kv_heads=1",), ("model.dropout=0.1",), ("train.ema=0.99",),
        ("optimizer=sgd",), ("optimizer.fused=false",), ("train.grad_clip=null",), ("data.vocab_size=4000",),
        ("accumulation.steps=3",),
    ):  # fmt: skip
        yield "gpt", (*GPT, *more)
    yield "gpt, lengths vary", (*GPT, "data.min_length=8", "batch.micro_size=4")
    for norm in ("batch", "group"):
        for precision in ("fp32", "bf16"):
            for mode in ("none", "selective", "full"):
                chosen = (f"model.norm={norm}", f"precision={precision}", f"activation_checkpointing={mode}")
                yield "resnet", (*RESNET, *chosen)
            yield "resnet", (*RESNET, f"model.norm={norm}", f"precision={precision}", "batch.micro_size=4")
    for more in (("model.depth=50",), ("model.stem=large",), ("train.ema=0.99",), ("optimizer=sgd",)):
        yield "resnet", (*RESNET, *more)


def planned(overrides: tuple[str, ...]) -> dict[str, Any]:
    """The plan, in this process, which is used for nothing else."""
    from trainapp.config import compose
    from trainapp.planning import planner

    config = compose.from_command_line([*BASE, *overrides])
    try:
        return planner.plan(config)[0]
    except Exception:
        return planner.plan(config, method="measured")[0]


def measured(overrides: tuple[str, ...], micro_size: int) -> int:
    """Peak bytes of a real run with this size."""
    from trainapp.config import compose
    from trainapp.parallel.ranks import SingleRank
    from trainapp.run.prepare import SessionStart, prepare
    from trainapp.signals import StopRequest
    from trainapp.training import loop

    fixed = any(override.startswith("accumulation.steps=") for override in overrides)
    sizes = () if fixed else (f"batch.micro_size={micro_size}",)
    with tempfile.TemporaryDirectory() as folder:
        config = compose.from_command_line([*BASE, *overrides, *sizes], folder)
        session = prepare(SessionStart(config), StopRequest(), SingleRank())
        try:
            for _ in range(STEPS):
                loop.train_step(session)
                loop.update_weight_average(session)
            return session.memory.peak
        finally:
            session.close()


def main() -> None:
    """Print one row per family, and one per configuration that is not exact."""
    parser = options_of(__doc__)
    parser.add_argument("--foreign", action="store_true", help="models that are not trainapp's own")
    parser.add_argument("--only", default="", help="configurations with this text in their overrides")
    parser.add_argument("--large", action="store_true", help="the time of one large plan")
    options = parser.parse_args()
    if options.large:
        sys.exit(int(not large_is_fast(options.json)))
    found = []
    pool = functools.partial(concurrent.futures.ProcessPoolExecutor, 1, multiprocessing.get_context("spawn"))
    with pool() as planning, pool() as training:
        for family, overrides in _foreign.cases() if options.foreign else cases():
            if options.only not in " ".join(overrides):
                continue
            facts = planning.submit(planned, overrides).result()
            peak = training.submit(measured, overrides, facts["micro_size"]).result()
            found.append(compared(family, overrides, facts, peak))
            if sys.stderr.isatty():
                print(f"\r{len(found)}", end="", file=sys.stderr)
    print(machine())
    print(report(found))
    write(options.json, found)
    near = sum(one["error"] <= 0.01 for one in found)
    sys.exit(int(not (foreign_is_good(found) if options.foreign else near >= 0.95 * len(found))))


def large_is_fast(json_file: Path | None) -> bool:
    """Time the plan of LARGE, and print it. Whether it took at most LARGE_SECONDS."""
    facts = planned(LARGE)
    processor_seconds = round(time.process_time(), 1)
    print(machine())
    print(table(["seconds", "processor seconds"], [[str(facts["seconds"]), str(processor_seconds)]]))
    write(json_file, {"seconds": facts["seconds"], "processor_seconds": processor_seconds})
    return facts["seconds"] <= LARGE_SECONDS


def compared(family: str, overrides: tuple[str, ...], facts: dict[str, Any], peak: int) -> dict:
    """The plan beside the measured peak. error: relative."""
    error = abs(facts["peak_bytes"] / peak - 1)
    return {
        "family": family,
        "overrides": overrides,
        "method": facts["method"],
        "planned": facts["peak_bytes"],
        "measured": peak,
        "is_exact": facts["peak_bytes"] == peak,
        "is_inside": error <= facts["margin"],
        "error": error,
        "seconds": facts["seconds"],
    }


def foreign_is_good(found: list[dict[str, Any]]) -> bool:
    """Whether 90% are within 3%, and every plan within its margin."""
    off = [one for one in found if one["error"] > 0.03]
    return len(off) <= 0.1 * len(found) and all(one["is_inside"] for one in found)


def report(found: list[dict[str, Any]]) -> str:
    """The tables."""
    rows = []
    for family in dict.fromkeys(one["family"] for one in found):
        own = [one for one in found if one["family"] == family]
        exact, inside = (sum(one[key] for one in own) for key in ("is_exact", "is_inside"))
        worst = max(one["error"] for one in own)
        near = sum(one["error"] <= 0.01 for one in own)
        seconds = sorted(one["seconds"] for one in own)[len(own) // 2]
        labels = ", ".join(sorted({one["method"] for one in own}))
        counts = [str(number) for number in (len(own), exact, inside)]
        rows.append([family, *counts, f"{100 * worst:.3f}%", f"{seconds:.1f}", str(near), labels])
    counted = ["model", "configurations", "exact", "in the margin"]
    columns = [*counted, "worst error", "median seconds", "within 1%", "method"]
    misses = [
        [one["family"], " ".join(one["overrides"][1:]), one["method"], str(one["planned"]), str(one["measured"])]
        for one in found
        if not one["is_exact"]
    ]
    text = table(columns, rows)
    if misses:
        text += "\n\n" + table(["model", "not exact", "method", "planned", "measured"], misses)
    return text


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TRAINAPP_CACHE", tempfile.mkdtemp())
    main()
