"""Optimizer steps per second of trainapp's loop, compared with hand-written loops that do the same work.

    python benchmarks/overhead.py [--device cuda] [--cases small wide gpt resnet] [--rounds N] [--json FILE]
    python benchmarks/overhead.py --draws          train.draws=per_sample, compared with train.draws=device

All loops train the same model from the same weights on the same samples (steps of 2 micro-batches of 32, clipped AdamW
with a cosine schedule), taking turns in one process. Each round gives one ratio to the hand-written loop; median and
quartiles over rounds are printed, so that other load on the machine affects all loops alike. The losses of the first 10
steps must agree before anything is timed. On CUDA the clock is read once the device has finished. Accelerate is
included if installed; it is not a dependency.
"""

import copy
import dataclasses
import importlib.util
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import keep_freed_memory, machine, options_of, quartiles, ratios, table, write
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from trainapp.config import compose
from trainapp.data.sampler import Permutation
from trainapp.files import json_lines
from trainapp.parallel.ranks import SingleRank
from trainapp.run.prepare import SessionStart, prepare
from trainapp.signals import StopRequest
from trainapp.training import loop
from trainapp.training.session import Session

GLOBAL, MICRO = 64, 32
LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-3, 0.05, 1.0
LOG_EVERY = 50
CHECKED_STEPS = 10
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}  # CUDA's kernels may add in any order
REFERENCE = "hand-written"
Loss = Callable[[nn.Module, Any], torch.Tensor]  # the sum over a micro-batch


def classification(model: nn.Module, batch: Any) -> torch.Tensor:
    """Over samples."""
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    """Over tokens."""
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), reduction="sum")


@dataclass(frozen=True)
class Case:
    """A model and its data.

    steps: per loop and round, a multiple of LOG_EVERY. target: of the ratio to the hand-written loop. counted: what the
    loss of one sample is divided by, its tokens.
    """

    about: str
    settings: tuple[str, ...]
    steps: int
    rounds: int
    target: float
    loss: Loss = classification
    counted: int = 1
    device: str = "cpu"


_IMAGES = ("model=resnet", "model.width=32", "data=synthetic_images")
_TOKENS = ("model=gpt", "model.width=256", "model.context_length=128", "data=synthetic_tokens")
_NOISE = (
    *("model=mlp", "model._target_=_denoiser.Denoiser", "~model.depth", "~model.dropout", "model.width=32"),
    *("data=synthetic_images", "user_packages=[_denoiser]", "task=_denoiser.loss"),
)
DRAWS = {"small": 0.99, "gpt_dropout": 0.95, "ddpm": 0.95}  # cases of --draws: the first draws nothing
CASES = {
    "small": Case("MLP 64-256-256-10", ("model=mlp", "model.width=256", "data=digits"), 100, 60, 0.97),
    "wide": Case("MLP 64-2048-2048-10", ("model=mlp", "model.width=2048", "data=digits"), 50, 10, 0.99),
    "gpt": Case("GPT, 4 blocks of 256, 128 tokens", _TOKENS, 50, 10, 0.95, next_token, 128),
    "gpt_dropout": Case("the same with dropout", (*_TOKENS, "model.dropout=0.1"), 20, 10, 0.95, next_token, 128),
    "ddpm": Case("a denoising model, 32 x 32", _NOISE, 20, 10, 0.95),
    "resnet": Case("ResNet-18, 32 channels, 32 x 32", _IMAGES, 50, 10, 0.95),
}


@dataclass
class Contender:
    """One loop. `advance(n)` runs n more steps; `losses()` returns the mean loss of each logged step."""

    name: str
    advance: Callable[[int], None]
    losses: Callable[[], dict[int, float]]


def main() -> None:
    """Measure the cases and print one table per case."""
    parser = options_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: small wide; with --draws its own three")
    parser.add_argument("--draws", action="store_true", help=f"only trainapp, in two ways: {', '.join(DRAWS)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, help="rounds per case (default: set by the case)")
    parser.add_argument("--steps", type=int, help=f"steps per loop and round, a multiple of {LOG_EVERY}")
    parser.add_argument("--width", type=int, help="model.width (default: set by the case)")
    parser.add_argument("--only-trainapp", action="store_true", help="run only trainapp and the reference")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; {machine()}")
    found = {}
    for name in options.cases or (DRAWS if options.draws else ["small", "wide"]):
        own = CASES[name]
        case = dataclasses.replace(
            own,
            about=f"{own.about}, width {options.width}" if options.width else own.about,
            settings=(*own.settings, f"model.width={options.width}") if options.width else own.settings,
            steps=options.steps or own.steps,
            rounds=options.rounds or own.rounds,
            device=options.device,
            target=DRAWS.get(name, own.target) if options.draws else own.target,
        )
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(case, Path(folder), options.only_trainapp, options.draws)
        print(f"\n{name}: {case.about}, on {case.device}, {case.rounds} rounds of {case.steps} steps")
        print(report(found[name]))
        reference, way = ("train.draws=device", "train.draws=per_sample") if options.draws else (REFERENCE, "trainapp")
        ratio = quartiles(found[name][way]["ratios"])[1]
        print(f"{way}: {ratio:.3f} of {reference} (target: at least {case.target})")
    write(options.json, found)


def measure(case: Case, folder: Path, only_trainapp: bool, draws: bool = False) -> dict[str, dict[str, list[float]]]:
    """Seconds per step and ratios to the reference (by wall and CPU time), by contender and round."""
    total = case.steps * (case.rounds + 1)
    if draws:
        contenders = [drawing(case, way, total, folder) for way in ("train.draws=device", "train.draws=per_sample")]
    else:
        checked = contenders_for(case, CHECKED_STEPS, folder / "check", only_trainapp, log_every=1)
        check_same_work(checked, TOLERANCE[case.device])
        contenders = contenders_for(case, total, folder / "timed", only_trainapp, log_every=LOG_EVERY)
    walls: dict[str, list[float]] = {c.name: [] for c in contenders}
    cpus: dict[str, list[float]] = {c.name: [] for c in contenders}
    for number in range(case.rounds + 1):
        # Every other round runs backwards, so that no loop always follows the same neighbour.
        for contender in contenders if number % 2 else reversed(contenders):
            wall, cpu = time.perf_counter(), time.process_time()
            contender.advance(case.steps)
            if case.device == "cuda":
                torch.cuda.synchronize()  # the loops before it have done the same: none works in the time of the next
            if number:  # the first round is warm-up; in it, trainapp's size is still unvalidated
                walls[contender.name].append((time.perf_counter() - wall) / case.steps)
                cpus[contender.name].append((time.process_time() - cpu) / case.steps)
    return {
        name: {"seconds": walls[name], "ratios": ratios(walls, name), "cpu_ratios": ratios(cpus, name)}
        for name in walls
    }


def check_same_work(contenders: list[Contender], tolerance: float = TOLERANCE["cpu"]) -> None:
    """Train each loop for CHECKED_STEPS. Raises RuntimeError if a loss differs from the reference: not the same work.

    Later steps prove nothing: after 50 steps of the wide case, fused and plain AdamW agree to 1e-14 in float64 but
    differ by 1.5% in float32, because rounding accumulates; after 10 steps they agree to 2e-7.
    """
    for contender in contenders:
        contender.advance(CHECKED_STEPS)
    reference = next(c for c in contenders if c.name == REFERENCE).losses()
    for contender in contenders:
        losses = contender.losses()
        if losses.keys() != reference.keys():
            raise RuntimeError(f"{contender.name} logged {len(losses)} steps, the reference {len(reference)}")
        for step, loss in losses.items():
            if not math.isclose(loss, reference[step], rel_tol=tolerance):
                raise RuntimeError(f"step {step}: {contender.name} has loss {loss}, the reference {reference[step]}")


def report(found: dict[str, dict[str, list[float]]]) -> str:
    """One row per loop."""
    rows = []
    for name, one in found.items():
        milliseconds = 1000 * quartiles(one["seconds"])[1]
        low, middle, high = quartiles(one["ratios"])
        cpu = quartiles(one["cpu_ratios"])[1]
        speed = f"{1000 / milliseconds:.0f}"
        rows.append([name, f"{milliseconds:.3f}", speed, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{cpu:.3f}"])
    return table(["loop", "ms/step", "steps/s", f"vs {next(iter(found))}", "quartiles", "by CPU time"], rows)


# --- The loops ------------------------------------------------------------------------------------------------------


def contenders_for(case: Case, total: int, folder: Path, only_trainapp: bool, log_every: int) -> list[Contender]:
    """Loops over `total` steps that all start from the same weights: those that can run here, the reference first."""
    session = trainapp_run(case, total, folder, log_every)
    others = ["samples one by one", "one by one, AdamW not fused"]
    others += ["Accelerate"] if importlib.util.find_spec("accelerate") else []
    names = [REFERENCE] if only_trainapp else [REFERENCE, *others]
    own, *rest = [contender(name, case, session, total, log_every) for name in names]
    return [own, trainapp_loop("trainapp", session), *rest]


def contender(name: str, case: Case, session: Session, total: int, log_every: int) -> Contender:
    """A loop that starts from the weights of `session`, which is still untrained."""
    data, model = session.batches.dataset, copy.deepcopy(session.state.model)
    fetch = one_by_one(data) if name.startswith(("samples", "one by one")) else batched(data)
    if case.device == "cuda":
        fetch = on_cuda(fetch)
    optimizer = adamw(model, fused=name != "one by one, AdamW not fused")
    batches = itertools.chain.from_iterable(map(fetch, epochs(len(data))))
    steps = (with_accelerate if name == "Accelerate" else hand_written)(case, model, optimizer, batches, total)
    losses: dict[int, float] = {}

    def advance(count: int) -> None:
        for step, loss in itertools.islice(steps, count):
            if step % log_every == 0:
                losses[step] = float(loss)

    return Contender(name, advance, lambda: losses)


def drawing(case: Case, way: str, total: int, folder: Path) -> Contender:
    """trainapp's loop with a way of drawing random numbers."""
    chosen = dataclasses.replace(case, settings=(*case.settings, way))
    return trainapp_loop(way, trainapp_run(chosen, total, folder / way, LOG_EVERY))


def trainapp_run(case: Case, total: int, folder: Path, log_every: int) -> Session:
    """The run that `python -m trainapp` builds from these settings; its tracker writes to `folder`."""
    overrides = [
        *case.settings,
        "data.drop_last=true",
        f"train.device={case.device}",
        "train.max_epochs=null",
        f"train.max_steps={total}",
        f"train.grad_clip={CLIP}",
        f"batch.global_size={GLOBAL}",
        f"batch.micro_size={MICRO}",
        f"optimizer.lr={LEARNING_RATE}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
        "optimizer.fused=true",
        "schedule=cosine",
        "schedule.warmup=0",
        f"every.log={log_every}",
        "every.eval=null",
        "every.save=null",
        "checkpointing=off",
    ]
    settings = compose.from_command_line(overrides, str(folder))
    folder.mkdir(parents=True)
    logging.basicConfig(filename=folder / "log", level=logging.INFO, force=True)  # so that log lines cost as in a run
    return prepare(SessionStart(settings), StopRequest(), SingleRank())


def trainapp_loop(name: str, session: Session) -> Contender:
    """`loop.train`; its losses are in metrics.jsonl."""

    def advance(steps: int) -> None:
        session.config.train.max_steps = session.state.progress.step + steps
        loop.train(session)

    lines = session.tracker.run_dir / "metrics.jsonl"
    return Contender(name, advance, lambda: {line["step"]: line["loss"] for line in json_lines(lines)})


Fetch = Callable[[list[list[int]]], Iterator[Any]]  # from the indices of an epoch's micro-batches to their batches
Steps = Iterator[tuple[int, torch.Tensor]]  # the number of each step that is done, and its mean loss


def batched(data: Dataset) -> Fetch:
    """trainapp's data path: the data set returns whole batches."""
    return lambda parts: map(data.__getitems__, parts)


def on_cuda(fetch: Fetch) -> Fetch:
    """Copied from pinned memory, without waiting."""

    def move(batch: Any) -> Any:
        return {key: value.pin_memory().to("cuda", non_blocking=True) for key, value in batch.items()}

    return lambda parts: map(move, fetch(parts))


def one_by_one(data: Dataset) -> Fetch:
    """The usual code: a data set of single samples, collated by torch's DataLoader."""
    everything = data.__getitems__(list(range(len(data))))

    class Samples(Dataset):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {key: values[index] for key, values in everything.items()}

    samples = Samples()
    return lambda parts: iter(DataLoader(samples, batch_sampler=parts))


def adamw(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    """AdamW without weight decay on biases, as in trainapp."""
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=fused or None)


def epochs(samples: int) -> Iterator[list[list[int]]]:
    """Each epoch's micro-batches: trainapp's sample order, full steps only."""
    for epoch in itertools.count():
        order = Permutation(0, samples).indices(epoch, 0, samples)
        yield [order[start : start + MICRO] for start in range(0, samples - samples % GLOBAL, MICRO)]


def cosine(step: int, total: int) -> float:
    """The learning rate of a step, counted from 0."""
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / total))


def hand_written(case: Case, model: nn.Module, optimizer: Optimizer, batches: Iterator[Any], total: int) -> Steps:
    """A loop written for this one run."""
    parameters, loss_of, count = list(model.parameters()), case.loss, GLOBAL * case.counted
    for step in range(total):
        loss_sum = 0.0
        for batch in itertools.islice(batches, 2):
            loss = loss_of(model, batch) / count
            loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step + 1, loss_sum


def with_accelerate(case: Case, model: nn.Module, optimizer: Optimizer, batches: Iterator[Any], total: int) -> Steps:
    """The same with Accelerate's gradient accumulation, as in its guide."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=case.device == "cpu", gradient_accumulation_steps=GLOBAL // MICRO)
    model, optimizer = accelerator.prepare(model, optimizer)
    step, loss_sum = 0, 0.0
    for batch in batches:
        with accelerator.accumulate(model):
            loss = case.loss(model, batch) / (MICRO * case.counted)  # divided by 2 in backward
            accelerator.backward(loss)
            loss_sum += loss.detach()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
                for group in optimizer.param_groups:
                    group["lr"] = cosine(step, total)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if accelerator.sync_gradients:
            step += 1
            yield step, loss_sum / 2
            loss_sum = 0.0


if __name__ == "__main__":
    keep_freed_memory()
    os.environ.setdefault("TRAINAPP_CACHE", tempfile.mkdtemp())
    main()
