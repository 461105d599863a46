"""Trains public programs beside their own loops: a checkout of pytorch/examples or of nanoGPT, which is not changed.

Each program's own training loop runs for some steps; then its port (foreign/) trains from the same weights on the same
samples. The losses must agree to 1e-5, with and without a memory limit that makes the port retry with smaller
micro-batches; a run that a signal interrupts and that continues must be equal bit for bit. Speeds are side by side:
the median of the original's steps after the first five, and of the port's after the first tenth
of a second run, which saves nothing: the originals do not save, either.

    python benchmarks/foreign_programs.py CHECKOUT
    python benchmarks/foreign_programs.py CHECKOUT --programs vae mnist
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _common import machine, options_of, table, write

PORTS = Path(__file__).resolve().parent / "foreign"
sys.path.insert(0, str(PORTS))

import originals  # noqa: E402
from originals import Original  # noqa: E402

TOLERANCE = 1e-5  # relative, of losses
WARMUP = 5  # steps that are not timed
TO_BE_CONTINUED = 75  # exit code of a run that a signal ended


@dataclass(frozen=True)
class Program:
    """A program of a checkout. prepare: runs its own loop, or only saves its samples where the port is refused.
    why_not_split: why a micro-batch cannot be smaller. refused_with: a word of the message with which it is refused.
    """

    file: str
    prepare: Callable[[Path, int, Path], Original | None]
    why_not_split: str | None = None
    refused_with: str | None = None


PROGRAMS = {
    "mnist": Program("mnist/main.py", originals.mnist),
    "vae": Program("vae/main.py", originals.vae),
    "super_resolution": Program("super_resolution/main.py", originals.super_resolution),
    "word_language_model": Program("word_language_model/main.py", originals.word_language_model),
    "gcn": Program("gcn/main.py", originals.gcn, why_not_split="one sample"),
    "dcgan": Program("dcgan/main.py", originals.dcgan, why_not_split="BatchNorm"),
    "time_sequence_prediction": Program(
        "time_sequence_prediction/train.py", originals.time_sequence_prediction, refused_with="LBFGS"
    ),
    "nanogpt": Program("configurator.py", originals.nanogpt),
}


@dataclass
class Figures:
    """What was found about a program. Differences are relative; speeds are steps per second."""

    original: float
    limited: float | None
    retries: int
    is_resumed_exactly: bool
    original_speed: float
    port_speed: float

    def problems(self) -> list[str]:
        """What must not be."""
        found = []
        if self.limited is not None and self.limited > TOLERANCE:
            found.append(f"losses under a limit differ by {self.limited:.1e}")
        if self.limited is not None and not self.retries:
            found.append("the limit made no retry")
        if not self.is_resumed_exactly:
            found.append("the resumed run differs")
        return found


class Port:
    """Runs the port of one program, each run in a directory of its own."""

    def __init__(self, name: str, checkout: Path, folder: Path, steps: int):
        self.name, self.checkout, self.folder, self.steps = name, checkout, folder, steps

    def run(self, run_dir: str, *overrides: str, interrupt_at: int | None = None) -> Path:
        """One run; the same directory again continues it. interrupt_at: the sample at which a signal ends it."""
        done = self.start(run_dir, *overrides, interrupt_at=interrupt_at)
        if done.returncode != (0 if interrupt_at is None else TO_BE_CONTINUED):
            raise RuntimeError(f"{done.args}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
        return self.folder / run_dir

    def start(self, run_dir: str, *overrides: str, interrupt_at: int | None = None) -> subprocess.CompletedProcess[str]:
        """One run, however it ends."""
        command = [
            sys.executable, "-m", "trainapp", "--config-dir", str(PORTS), f"experiment={self.name}",
            f"hydra.run.dir={run_dir}", f"model.checkout={self.checkout}", f"train.max_steps={self.steps}", *overrides,
        ]  # fmt: skip
        environment = {**os.environ, "INTERRUPT_AT_SAMPLE": str(interrupt_at)}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)

    def is_same_run(self, first: Path, second: Path) -> bool:
        """Whether `trainapp diff` finds their losses and weights identical."""
        command = [sys.executable, "-m", "trainapp", "diff", str(first), str(second)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
        return done.returncode == 0


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def difference(reference: list[float], values: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(reference, values, strict=True))


def limit_between(run: Path) -> int:
    """Bytes that hold the weights and their state, and three quarters of what a step of one micro-batch needed beside
    them: several micro-batches also keep the sums of their gradients.
    """
    lines = metrics(run)
    held = max(line["memory/allocated"] for line in lines)
    peak = max(line["memory/peak"] for line in lines)
    return int(held + 0.75 * (peak - held))


def compare(port: Port, program: Program, original: Original) -> Figures:
    """All runs of a port, beside its original."""
    samples = torch.load(port.folder / "samples.pt")
    in_all = len(next(iter(samples.values())))
    plain = port.run("plain")
    lines = metrics(plain)
    losses = [line["loss"] for line in lines]
    differences = [
        difference(expected, [line[metric] for line in lines]) for metric, expected in original.losses.items()
    ]
    if max(differences) > TOLERANCE:
        sys.exit(f"{port.name}: losses differ from the original's by {max(differences):.1e}")

    limited, retries = None, 0
    if program.why_not_split is None:
        run = port.run("limited", f"memory.limit={limit_between(plain)}")
        limited = difference(losses, [line["loss"] for line in metrics(run)])
        retries = json.loads((run / "result.json").read_text())["oom_restarts"]

    port.run("resumed", interrupt_at=in_all // 2 if in_all > 1 else port.steps // 2)
    resumed = port.run("resumed")

    timed = port.run("timed", f"train.max_steps={3 * port.steps}", f"every.log={port.steps // 2}", "every.save=null")
    speeds = [line["samples_per_second"] / line["batch/global_size"] for line in metrics(timed)[1:]]
    return Figures(
        original=max(differences),
        limited=limited,
        retries=retries,
        is_resumed_exactly=port.is_same_run(plain, resumed),
        original_speed=1 / statistics.median(original.seconds[WARMUP:]),
        port_speed=statistics.median(speeds),
    )


def row(name: str, program: Program, found: Figures) -> list[str]:
    """A row of the table."""
    limited = program.why_not_split or f"{found.limited:.1e} ({found.retries})"
    resumed = "identical" if found.is_resumed_exactly else "differs"
    speeds = (found.original_speed, found.port_speed, found.port_speed / found.original_speed)
    return [name, f"{found.original:.1e}", limited, resumed, *(f"{speed:.2f}" for speed in speeds)]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/examples or of nanoGPT")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, help="all that the checkout has")
    parser.add_argument("--steps", type=int, default=20, help="an even number")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    checkout = args.checkout.resolve()
    chosen = args.programs or [name for name, program in PROGRAMS.items() if (checkout / program.file).exists()]
    if not chosen:
        parser.error(f"{args.checkout} has none of the programs {', '.join(PROGRAMS)}")

    torch.set_num_threads(1)
    rows, figures, problems = [], {}, []
    for name in chosen:
        program = PROGRAMS[name]
        with tempfile.TemporaryDirectory() as temporary:
            port = Port(name, checkout, Path(temporary), args.steps)
            torch.manual_seed(0)
            original = program.prepare(checkout, args.steps, port.folder)
            if original is None:
                done = port.start("refused")
                print(f"{name}: {done.stderr.strip()}\n", flush=True)
                if done.returncode == 0 or str(program.refused_with) not in done.stderr:
                    problems.append(f"{name}: not refused with {program.refused_with}")
                continue
            found = compare(port, program, original)
        figures[name] = asdict(found)
        rows.append(row(name, program, found))
        problems += [f"{name}: {problem}" for problem in found.problems()]

    print(f"torch {torch.__version__}, one thread, {machine()}")
    header = ["program", "to original", "with limit (retries)", "resumed", "its steps/s", "port's", "ratio"]
    print(table(header, rows))
    write(args.json, figures)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
