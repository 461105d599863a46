"""Relative times of levers on a GPU that is not here, as plans estimate them, beside what others have published.

    python benchmarks/plan_cuda_times.py [--only TEXT] [--checkout CHECKOUT]

Each row is the time of a step with a lever, relative to one without: measured on a GPU by others, of their own
programs, and estimated with trainapp's model of the same shape, which is not like for like. With CHECKOUT, of
github.com/Wedsonlin/assignment2-systems (MIT; commit 87b0864), also that of its own program's forward and backward in
bf16, relative to TF32, beside what another student of the same course has measured with it.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from _common import machine, table
from plan_cuda import LLAMA_3B, LLAMA_7B, in_a_process, move_to_cuda

_CHUNKED = (*LLAMA_3B, "memory.loss_chunk=auto")
_TORCHAO = (*LLAMA_7B, "optimizer=adamw_bf16")
_FULL = "activation_checkpointing=full"


class Row(NamedTuple):
    """A published measurement: seconds with `changed` over seconds without. base: the configuration without it."""

    source: str
    real: float
    base: tuple[str, ...]
    changed: tuple[str, ...]


ROWS = (
    Row("torchtune's README, Llama-3.2-3B, A100: chunked loss", 8998 / 9174, LLAMA_3B, ("memory.loss_chunk=auto",)),
    Row("the same: checkpointing", 9174 / 7210, _CHUNKED, (_FULL,)),
    Row(
        "the same: update in the backward",
        7210 / 7309,
        (*_CHUNKED, _FULL),
        ("optimizer.in_backward=true", "train.grad_clip=null"),
    ),
    Row("the same: 8-bit AdamW", 7301 / 6960, (*_CHUNKED, _FULL), ("optimizer=adamw_8bit",)),
    Row("torchao, Llama-2-7B, A100: 8-bit AdamW", 3200 / 2900, _TORCHAO, ("optimizer=adamw_8bit",)),
    Row("the same: 4-bit AdamW", 3200 / 2900, _TORCHAO, ("optimizer=adamw_4bit",)),
)  # fmt: skip
# By layers, width, heads, width of the feed-forward layer and batch; context 256, on an A100 80GB PCIe: milliseconds of
# forward and backward in fp32 (36 TFLOP/s, so with TF32) and with autocast to bf16. From
# github.com/GAOYUEtianc/Stanford-CS336-assignments, assignment2-systems/answers.md.
COURSE = {(12, 768, 12, 3072, 64): (348.56, 295.53), (36, 1280, 20, 5120, 32): (1026.15, 805.50)}


def seconds(overrides: tuple[str, ...]) -> float:
    """Of a step, as a plan estimates them. In a process of its own."""
    from trainapp.assembly.components import load_components
    from trainapp.config import compose
    from trainapp.planning.cuda.planner import for_device
    from trainapp.planning.workload import given_size
    from trainapp.torch_private import fake_tensor_mode

    fake_tensor_mode()
    planner = for_device(compose.from_command_line([*overrides, "every.eval=null"]), load_components)
    planner.counts_work = True
    size = given_size(planner.config, planner.workload.share)
    assert size is not None, "each row gives its micro-batch"
    return planner.measured(size, 0).work.seconds(planner.speeds)


def of_course(checkout: Path, shape: tuple[int, ...], autocast: bool) -> float:
    """Of a forward and a backward of that repository's program."""
    import torch

    from trainapp.config import compose
    from trainapp.planning.cuda import devices, pretend, self_test
    from trainapp.planning.cuda.speeds import GpuSpeeds, rates_of
    from trainapp.planning.step_work import WorkCounter
    from trainapp.planning.values import MadeUpValues
    from trainapp.torch_private import fake_tensor_mode
    from trainapp.train.phase import Phase

    sys.path.insert(0, str(checkout / "cs336-basics"))
    from cs336_basics.model import BasicsTransformerLM  # type: ignore[import-not-found]
    from cs336_basics.nn_utils import cross_entropy  # type: ignore[import-not-found]

    device = devices.find("a100-80gb")
    layers, width, heads, inner, batch = shape
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend.pretended(device))
        stack.enter_context(fake_tensor_mode())
        stack.enter_context(MadeUpValues())
        self_test.require(device, stack.enter_context(pretend.EngineOnCuda()))
        model = BasicsTransformerLM(10_000, 256, width, layers, heads, inner, rope_theta=10_000.0)
        move_to_cuda(model)
        stack.enter_context(torch.device("cuda"))
        inputs, targets = (torch.randint(0, 10_000, (batch, 256)) for _ in range(2))
        counter = stack.enter_context(WorkCounter(lambda: Phase.FORWARD))
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = cross_entropy(model(inputs), targets)
        loss.backward()
    config = compose.from_command_line(["precision=tf32"])
    return counter.work.seconds(GpuSpeeds(rates_of(device), config))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose source has this text")
    parser.add_argument("--checkout", type=Path, help="of github.com/Wedsonlin/assignment2-systems")
    options = parser.parse_args()
    print(f"{machine()}\n", flush=True)
    rows: list[tuple[str, ...]] = []

    def add(source: str, real: float, base: float, changed: float) -> None:
        estimate = changed / base
        rows.append((source, f"x {real:.3f}", f"x {estimate:.3f}", f"{100 * (estimate / real - 1):+.1f}%"))

    for row in ROWS:
        if options.only in row.source:
            add(row.source, row.real, *(of_a_row(part) for part in (row.base, (*row.base, *row.changed))))
    for shape, (plain, in_bf16) in COURSE.items() if options.checkout else ():
        found = [in_a_process(of_course, options.checkout, shape, autocast) for autocast in (False, True)]
        add(f"CS336's GPT of {shape[0]} layers, A100: bf16 instead of TF32", in_bf16 / plain, *found)
        for name, milliseconds, estimate in (("TF32", plain, found[0]), ("bf16", in_bf16, found[1])):
            print(f"{shape}: {1000 * estimate:.0f} ms in {name}, measured {milliseconds:.0f}")
    print(table(("source", "measured", "estimated", ""), rows), flush=True)


def of_a_row(overrides: tuple[str, ...]) -> Any:
    """`seconds` in a process of its own."""
    return in_a_process(seconds, overrides)


if __name__ == "__main__":
    main()
