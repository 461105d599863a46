"""Samples per second in bf16 and fp16 beside fp32 on this CPU, and the operators that are emulated where it lacks the
instructions.

    python benchmarks/precision_speed.py [--cases resnet gpt] [--rounds N] [--steps N] [--threads N] [--json FILE]
    python benchmarks/precision_speed.py --operators      one by one: torch's own kernel, and the emulated one

Each precision trains in a process of its own, as in a run; they take turns, so that other load on the machine affects
all alike. A round gives one ratio to fp32; median and quartiles over rounds are printed. On a CPU with AVX-512, and on
Linux, `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` in front of the command imitates one without.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import machine, options_of, quartiles, ratios, table, write
from torch import Tensor, nn

from trainapp.config import compose
from trainapp.optim import emulated_kernels
from trainapp.parallel.ranks import SingleRank
from trainapp.run.prepare import SessionStart, prepare
from trainapp.signals import StopRequest
from trainapp.training import loop

TARGET = 0.7  # of fp32's samples per second
MODES = ("fp32", "bf16", "fp16")
BATCH = 64
WARM_UP = 5  # steps


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its data, and the steps of a round."""

    settings: tuple[str, ...]
    steps: int


CASES = {
    "resnet": Case(("model=resnet", "data=digits"), 10),
    "gpt": Case(("model=gpt", "data=synthetic_tokens"), 2),
}


def main() -> None:
    """Measure the cases, or the operators, and print a table of each."""
    parser = options_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="steps per round (default: set by the case)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--operators", action="store_true")
    options = parser.parse_args()
    native = [
        str(dtype).removeprefix("torch.") for dtype in emulated_kernels.REDUCED if emulated_kernels.is_native(dtype)
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {capability}, {options.threads} thread(s); {machine()}")
    print(f"multiplied by instructions of this CPU: {', '.join(native) or 'neither bfloat16 nor float16'}")
    torch.set_num_threads(options.threads)
    if options.operators:
        rows = operator_rows()
        print(table(["operator, with its backward", *COLUMNS], [[name, *map(str, row)] for name, row in rows.items()]))
        write(options.json, rows)
        return
    figures = {}
    for name in options.cases:
        case = CASES[name]
        steps = options.steps or case.steps
        seconds = measure(case, steps, options.rounds, options.threads)
        figures[name] = {mode: {"seconds": seconds[mode], "ratios": ratios(seconds, mode)} for mode in MODES}
        print(f"\n{name}: {' '.join(case.settings)}, {options.rounds} rounds of {steps} steps of {BATCH} samples")
        print(report(figures[name]))
    print(f"target: at least {TARGET} in bf16")
    write(options.json, figures)


# --- whole steps


def measure(case: Case, steps: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds per step of each round, by precision."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workers = {mode: stack.enter_context(worker(case, mode, threads, Path(folder, mode))) for mode in MODES}
        for number in range(rounds):
            # Every other round runs backwards, so that no precision always follows the same neighbour.
            for mode in MODES if number % 2 else reversed(MODES):
                workers[mode].send(steps)
                seconds[mode].append(workers[mode].recv() / steps)
    return seconds


@contextlib.contextmanager
def worker(case: Case, mode: str, threads: int, run_dir: Path) -> Iterator[Connection]:
    """A process that trains in this precision, and its pipe: send a number of steps, receive the seconds they took."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=train, args=(case, mode, threads, run_dir, there), daemon=True)
    process.start()
    there.close()  # so that `recv` raises EOFError once the worker has died
    try:
        here.recv()  # it has warmed up
        yield here
    finally:
        here.close()
        process.join(timeout=60)


def train(case: Case, mode: str, threads: int, run_dir: Path, pipe: Connection) -> None:
    """The worker: the run that `python -m trainapp` builds from these settings, some steps at a time."""
    torch.set_num_threads(threads)
    quiet = ("every.eval=null", "every.save=null", "every.log=null", "checkpointing=off", "memory.guard=false")
    length = ("train.max_epochs=null", "train.max_steps=1000000", "data.drop_last=true")
    sizes = (f"batch.global_size={BATCH}", f"batch.micro_size={BATCH}")
    overrides = (*case.settings, f"precision={mode}", "train.device=cpu", *sizes, *length, *quiet)
    run_dir.mkdir()
    logging.basicConfig(filename=run_dir / "log", level=logging.INFO, force=True)
    session = prepare(SessionStart(compose.from_command_line(overrides, str(run_dir))), StopRequest(), SingleRank())

    def advance(steps: int) -> float:
        started = time.perf_counter()
        session.config.train.max_steps = session.state.progress.step + steps
        loop.train(session)
        return time.perf_counter() - started

    advance(WARM_UP)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(advance(pipe.recv()))


def report(figures: dict[str, dict[str, list[float]]]) -> str:
    """One row per precision."""
    rows = []
    for mode, of_mode in figures.items():
        per_step = quartiles(of_mode["seconds"])[1]
        low, middle, high = quartiles(of_mode["ratios"])
        rows.append([mode, f"{BATCH / per_step:.0f}", f"{middle:.2f}", f"{low:.2f} - {high:.2f}"])
    return table(["precision", "samples/s", "vs fp32", "quartiles"], rows)


# --- operators

COLUMNS = ("fp32 ms", "bf16 ms", "emulated ms", "difference", "fp16 ms", "emulated ms", "difference")
Operator = tuple[Callable[..., Any], list[Tensor]]


def operators() -> dict[str, Operator]:
    """Functions with small arguments, by name: those that are emulated, and those that are not."""
    images, kernels, tokens = torch.randn(64, 64, 8, 8), torch.randn(64, 64, 3, 3) / 24, torch.randn(512, 512)
    heads = [torch.randn(4, 4, 128, 32) for _ in range(3)]
    recurrent = nn.LSTM(64, 64, batch_first=True)

    def lstm(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", inputs.dtype, enabled=inputs.dtype is not torch.float32):
            return recurrent.to(torch.float32)(inputs.float())[0]

    def attention(*of_heads: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*of_heads, is_causal=True)

    return {
        "matmul 512 x 512 x 512": (torch.mm, [tokens, torch.randn(512, 512)]),
        "batched matmul 16 x 64 x 64 x 64": (torch.bmm, [torch.randn(16, 64, 64), torch.randn(16, 64, 64)]),
        "convolution 3 x 3 of [64, 64, 8, 8]": (lambda x, w: F.conv2d(x, w, padding=1), [images, kernels]),
        "attention [4, 4, 128, 32]": (attention, heads),
        "LSTM [16, 32, 64], autocast": (lstm, [torch.randn(16, 32, 64)]),
        "BatchNorm": (lambda x: F.batch_norm(x, None, None, training=True), [images]),
        "max-pool 2 x 2": (lambda x: F.max_pool2d(x, 2), [images]),
        "LayerNorm": (lambda x: F.layer_norm(x, (512,)), [tokens]),
        "softmax": (lambda x: F.softmax(x, -1), [tokens]),
        "GELU": (F.gelu, [tokens]),
    }


def operator_rows() -> dict[str, list[Any]]:
    """Milliseconds of forward and backward, by torch's own kernel and emulated, and how much the results differ."""
    torch.manual_seed(0)
    measured = operators()
    own = {dtype: {name: timed(*operator, dtype) for name, operator in measured.items()} for dtype in _DTYPES}
    emulated = {}
    for dtype in emulated_kernels.REDUCED:
        emulated_kernels.install_for(torch.device("cpu"), dtype)
        emulated[dtype] = {name: timed(*operator, dtype) for name, operator in measured.items()}
    rows = {}
    for name, (milliseconds, _) in own[torch.float32].items():
        row: list[Any] = [f"{milliseconds:.2f}"]
        for dtype in emulated_kernels.REDUCED:
            (before, expected), (after, result) = own[dtype][name], emulated[dtype][name]
            row += ["fails" if before is None else f"{before:.2f}", f"{after:.2f}", difference(result, expected)]
        rows[name] = row
    return rows


_DTYPES = (torch.float32, *emulated_kernels.REDUCED)


def timed(function: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype) -> tuple[float | None, list[Tensor]]:
    """Milliseconds of a forward with its backward, the median of several; and the output and the gradients.

    None without results for a function that torch refuses in this dtype here.
    """
    leaves = [value.to(dtype).requires_grad_() for value in inputs]

    def once() -> list[Tensor]:
        output = function(*leaves)
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
        return [output.detach(), *gradients]

    try:
        results = once()
    except RuntimeError:
        return None, []
    milliseconds = []
    for _ in range(5):
        started = time.perf_counter()
        once()
        milliseconds.append(1000 * (time.perf_counter() - started))
    return quartiles(milliseconds)[1], results


def difference(results: list[Tensor], expected: list[Tensor]) -> str:
    """The largest relative difference of a tensor, by norm."""
    if not expected:
        return "-"
    pairs = zip(results, expected, strict=True)
    return f"{max(float((one.float() - two.float()).norm() / two.float().norm()) for one, two in pairs):.1e}"


if __name__ == "__main__":
    main()
