"""A whole training step traced on CUDA tensors without a GPU, against what a GPU has recorded.

    python benchmarks/plan_cuda.py CHECKOUT
    python benchmarks/plan_cuda.py --published [--only TEXT]

CHECKOUT is github.com/Wedsonlin/assignment2-systems (MIT; commit 87b0864), whose GPT needs einops, einx and jaxtyping.
One warm step is compared with the peaks of the four training snapshots in it. Nothing is downloaded.

--published: instead, `plan.device` with trainapp's GPT of the same shape, beside peaks that other projects have
published of their own programs: not like for like. The exit code is 1 if a row without a reason is off by more than
10%.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from _common import machine, table

MIB = 2**20
WARM_UP = 5  # steps of that program before the one that is recorded
# By context length: autocast; MiB allocated (as requested) and reserved at the peak of the snapshot's step.
SNAPSHOTS = {
    128: (False, 6688.44, 6900),
    256: (False, 8681.82, 8836),
    512: (True, 11850.96, 12074),
    1024: (True, 23085.75, 24012),
}


A100_80 = "plan.device=a100-80gb"
LLAMA_3B = (
    "model=gpt", "model.depth=28", "model.width=3072", "model.heads=24", "model.kv_heads=8",
    "model.context_length=4096", "data=synthetic_tokens", "data.vocab_size=128256", "data.size=4", "data.val_size=2",
    "batch.global_size=2", "batch.micro_size=2", "precision=bf16_pure", "optimizer=adamw_bf16", A100_80,
)  # fmt: skip
LLAMA_7B = (
    "model=gpt", "model.depth=32", "model.width=4096", "model.heads=32", "model.mlp_ratio=2.6875",
    "model.tie_embeddings=false", "model.context_length=2048", "data=synthetic_tokens", "data.vocab_size=32000",
    "data.size=2", "data.val_size=1", "batch.global_size=1", "batch.micro_size=1", "precision=bf16_pure",
    "activation_checkpointing=full", A100_80,
)  # fmt: skip
_FULL = "activation_checkpointing=full"
# Llama 3 8B on H100s with 96 GB, of which the rows took less than all: here no memory is returned to make it fit.
_LLAMA_8B = (
    "model=gpt", "model.depth=32", "model.width=4096", "model.heads=32", "model.kv_heads=8", "model.mlp_ratio=3.5",
    "model.tie_embeddings=false", "model.context_length=8192", "data=synthetic_tokens", "data.vocab_size=128256",
    "data.size=256", "data.val_size=128", "precision=bf16", "parallel=fsdp", "parallel.fsdp.meta_init=true",
    "plan.device=192GiB@9.0",
)  # fmt: skip
_OWN_DDP = (
    "model=gpt", "model.depth=32", "model.width=2560", "model.heads=32", "model.mlp_ratio=4",
    "model.tie_embeddings=false", "model.context_length=512", "data=synthetic_tokens", "data.vocab_size=10000",
    "data.size=4", "data.val_size=2", "batch.global_size=4", "batch.micro_size=2", "precision=bf16", "parallel=ddp",
    "plan.world=2", "optimizer.fused=false", "+optimizer.foreach=false", A100_80,
)  # fmt: skip


class Row(NamedTuple):
    """A published measurement. real: GiB; of: whether allocated or reserved. reason: why the plan may be off by more
    than 10%, "" for none.
    """

    source: str
    real: float
    of: str
    overrides: tuple[str, ...]
    reason: str = ""


_UNKNOWN_BATCH = "the batch is not stated: one text of 2048 tokens is planned"
_FIRST_STEP = "measured in the first step, whose backward finds no moments in memory"
_EVERY_SECOND = "torchtitan recomputes every second product, trainapp's selective none"
PUBLISHED = (
    Row("torchtune's README, Llama-3.2-3B in bf16, 2 x 4096 tokens", 60.0, "allocated", LLAMA_3B),
    Row(
        "the same, chunked loss and checkpointing",
        24.9,
        "allocated",
        (*LLAMA_3B, _FULL, "memory.loss_chunk=auto"),
    ),
    Row("torchao, Llama-2-7B in bf16", 51.6, "allocated", (*LLAMA_7B, "optimizer=adamw_bf16"), _UNKNOWN_BATCH),
    Row(
        "pytorch#132445, Llama-3-8B, FSDP2 on 8 GPUs, 1 x 8192 tokens",
        77.29,
        "reserved",
        (*_LLAMA_8B, "plan.world=8", "batch.global_size=8", "batch.micro_size=1"),
        "torchtitan's own model and loss, torch of June 2024; not explained further",
    ),
    Row(
        "torchtitan 2024-12, Llama-3.1-8B, FSDP2 on 8 GPUs, 2 x 8192 tokens, selective",
        82.4,
        "reserved",
        (
            *_LLAMA_8B, "plan.world=8", "batch.global_size=16", "batch.micro_size=2",
            "activation_checkpointing=selective",
        ),
        _EVERY_SECOND,
    ),
    Row(
        "the same on 128 GPUs",
        67.0,
        "reserved",
        (
            *_LLAMA_8B, "plan.world=128", "batch.global_size=256", "batch.micro_size=2",
            "activation_checkpointing=selective",
        ),
        _EVERY_SECOND,
    ),
    Row(
        "Wedsonlin/assignment2-systems, 3.4B, own DDP on 2 GPUs, 2 x 512 tokens",
        51.30,
        "allocated",
        _OWN_DDP,
        _FIRST_STEP,
    ),
)  # fmt: skip


def published(only: str) -> bool:
    """Print the table of the rows whose source contains the text. Whether all without a reason are within 10%."""
    import trainapp

    found, good = [], True
    for row in PUBLISHED:
        if only not in row.source:
            continue
        facts = trainapp.plan([*row.overrides, "every.eval=null", "plan.levers=false"])
        if "reserved_bytes" not in facts:
            raise SystemExit(f"{row.source}: {facts['certainty']}: {facts['reason']}")
        planned = {name: facts[f"{name}_bytes"] / 2**30 for name in ("allocated", "reserved")}
        error = planned[row.of] / row.real - 1
        good &= bool(row.reason) or abs(error) <= 0.1
        figures = (f"{row.real:.1f}", row.of, *(f"{planned[name]:.1f}" for name in planned), f"{100 * error:+.1f}%")
        found.append((row.source, *figures, row.reason))
        print(f"{row.source}: {facts['seconds']:.0f} s", file=sys.stderr, flush=True)
    columns = ("source", "GiB measured", "of", "allocated", "reserved", "", "why it may be off")
    print(table(columns, found), flush=True)
    return good


def move_to_cuda(model: Any) -> None:
    """In place, without `model.to`, which cannot move tensors without data."""
    import torch

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().to("cuda")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to("cuda"))


def stepped(checkout: Path, context: int) -> tuple[int, int]:
    """Bytes allocated (as requested) and reserved at the peak of a warm step of that repository's program."""
    import torch

    from trainapp.memory.live_tensors import LiveTensors
    from trainapp.planning.cuda import allocations, devices, place, pretend, self_test
    from trainapp.planning.values import MadeUpValues
    from trainapp.torch_private import fake_tensor_mode

    sys.path.insert(0, str(checkout / "cs336-basics"))
    from cs336_basics.model import BasicsTransformerLM  # type: ignore[import-not-found]
    from cs336_basics.nn_utils import cross_entropy  # type: ignore[import-not-found]
    from cs336_basics.optimizer import AdamW  # type: ignore[import-not-found]

    device, autocast = devices.find("a100-40gb"), SNAPSHOTS[context][0]
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend.pretended(device))
        stack.enter_context(fake_tensor_mode())
        stack.enter_context(MadeUpValues())
        counter = stack.enter_context(LiveTensors(devices=("cuda",)))
        self_test.require(device, stack.enter_context(pretend.EngineOnCuda()))
        counter.events.clear()
        model = BasicsTransformerLM(10_000, context, 1024, 24, 16, 4096, rope_theta=10_000.0)
        move_to_cuda(model)
        stack.enter_context(torch.device("cuda"))
        optimizer = AdamW(model.parameters())
        sizes = (WARM_UP, 1, WARM_UP, 1)
        inputs, last_inputs, targets, last_targets = (torch.randint(0, 10_000, (n, 4, context)) for n in sizes)
        for step in range(WARM_UP + 1):
            if step == WARM_UP:
                output = loss = None
                counter.peak = counter.live
            with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
                output = model(inputs[step] if step < WARM_UP else last_inputs[0])
                loss = cross_entropy(output, targets[step] if step < WARM_UP else last_targets[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        workspaces = place.THREADS * device.cublas_workspace
        events = [(-1 - n, device.cublas_workspace) for n in range(place.THREADS)] + counter.events
        replayed = allocations.Allocations(workspaces, events).replayed(expandable=False)
        return counter.peak + workspaces, replayed.peak_reserved


def main() -> None:
    """Print the table. The exit code is 1 if an allocated peak is off by more than 0.5%."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="of github.com/Wedsonlin/assignment2-systems")
    parser.add_argument("--published", action="store_true", help="rows that other projects have published, instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="with --published, rows whose source has this text")
    options = parser.parse_args()
    if options.published == (options.checkout is not None):
        parser.error("either a checkout or --published")
    print(f"{machine()}\n", flush=True)
    if options.published:
        sys.exit(not published(options.only))
    rows, worst = [], 0.0
    for length, (_, real, real_reserved) in SNAPSHOTS.items():
        live, reserved = (size / MIB for size in in_a_process(stepped, options.checkout, length))
        worst = max(worst, abs(live / real - 1))
        rows.append(
            (
                f"context {length}", f"{real:.2f}", f"{live:.2f}", f"{100 * (live / real - 1):+.2f}%",
                f"{real_reserved}", f"{reserved:.0f}", f"{100 * (reserved / real_reserved - 1):+.2f}%",
            )
        )  # fmt: skip
    print(table(("snapshot, MiB", "allocated", "predicted", "", "reserved", "predicted", ""), rows), flush=True)
    sys.exit(worst > 0.005)


def in_a_process(function: Any, *arguments: Any) -> Any:
    """What it returns in a process of its own. Ends this one with its error, if it has one."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(False)
    process = context.Process(target=_answer, args=(sending, function, arguments))
    process.start()
    sending.close()
    try:
        found = receiving.recv()
    except EOFError:
        found = f"{function.__name__}: the process ended"
    process.join()
    if isinstance(found, str):
        raise SystemExit(found)
    return found


def _answer(sending: Any, function: Any, arguments: tuple[Any, ...]) -> None:
    try:
        found = function(*arguments)
    except Exception as error:
        found = f"{function.__name__}: {type(error).__name__}: {error}"
    sending.send(found)
    sending.close()
    os._exit(0)  # the engine's threads still point to what was pretended


if __name__ == "__main__":
    main()
