"""The cost of votes; and DDP and FSDP2 in trainapp, compared with hand-written loops in the same processes.

    python benchmarks/ranks.py [--ranks 2] [--rounds 12] [--steps 25] [--width 128] [--json FILE]

All loops train the same GPT from the same weights on the same samples, with 2 micro-batches per step and rank, taking
turns in the same processes. A ratio is steps per second relative to the hand-written loop in the same round. If the
losses after the first round do not agree to 1e-4, the benchmark fails. It uses CPU processes over gloo: the relative
cost of a vote in a CPU step says little about a GPU step.
"""

import argparse
import contextlib
import copy
import math
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import machine, options_of, quartiles, ratios, table, write

SAMPLES, MICRO = 16, 4  # samples per step over all ranks; per micro-batch
LEARNING_RATE, CLIP = 1e-3, 1.0
STRATEGIES = ("ddp", "fsdp")
VOTES = "trainapp, votes"


def main() -> None:
    """Print one table per strategy."""
    parser = options_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25, help="steps per loop and round")
    parser.add_argument("--width", type=int, default=128, help="width of the GPT")
    options = parser.parse_args()
    print(f"{machine()}; {options.ranks} ranks over gloo, one thread each")
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        found[strategy] = measure(strategy, options)
        print(f"\n{strategy}: GPT, 4 blocks of width {options.width}, {options.rounds} rounds of {options.steps} steps")
        print(report(found[strategy]))
    write(options.json, found)


def report(seconds: dict[str, list[float]]) -> str:
    """One row per loop, the hand-written one first."""
    rows = []
    for name, own in seconds.items():
        low, middle, high = quartiles(ratios(seconds, name))
        rows.append([name, f"{1000 * quartiles(own)[1]:.2f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}"])
    return table(["loop", "ms/step", "vs hand-written", "quartiles"], rows)


def measure(strategy: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step of each loop, by round, on rank 0. Raises what a rank raises."""
    from torch.multiprocessing import spawn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(work, (strategy, options, port, answers), nprocs=options.ranks)
    found: dict[str, list[float]] = answers.get()
    return found


def work(rank: int, strategy: str, options: argparse.Namespace, port: int, answers: Any) -> None:
    """One rank: all loops, taking turns."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    from trainapp.launch.worker import process_group
    from trainapp.parallel.ranks import DistributedRanks

    total = options.steps * (options.rounds + 2)
    with tempfile.TemporaryDirectory() as folder:
        settings = configured(strategy, options, total, Path(folder))
        with process_group(settings) as ranks:
            loops: dict[str, Callable[[int], None]] = {}
            losses: dict[str, Callable[[], float]] = {}
            steps, losses["hand-written"] = hand_written(strategy, settings, ranks, options.steps)
            loops["hand-written"] = lambda count: [next(steps) for _ in range(count)] and None
            own_ranks = []
            for name, vote_on_oom in (("trainapp, no votes", "never"), (VOTES, "always")):
                settings = configured(strategy, options, total, Path(folder) / name)
                own_ranks.append(DistributedRanks(ranks.device, settings.parallel.timeout, vote_on_oom))
                loops[name], losses[name] = trainapp(settings, own_ranks[-1])
            seconds: dict[str, list[float]] = {name: [] for name in loops}
            for number in range(options.rounds + 1):
                # Shuffled, since a loop that follows itself is faster; the same order on all ranks.
                for name in random.Random(number).sample(list(loops), len(loops)):
                    torch.distributed.barrier()
                    began = time.perf_counter()
                    loops[name](options.steps)
                    torch.distributed.barrier()
                    if number:  # the first round is warm-up; in it, trainapp's size is still unvalidated
                        seconds[name].append((time.perf_counter() - began) / options.steps)
            expected = losses["hand-written"]()
            for name, loss in losses.items():
                if not math.isclose(loss(), expected, rel_tol=1e-4):
                    raise RuntimeError(f"{name} ends with loss {loss()}, the hand-written loop with {expected}")
            if rank == 0:
                answers.put(seconds)
            torch.distributed.barrier()
            for other in own_ranks:
                other.release_groups()


def configured(strategy: str, options: argparse.Namespace, total: int, folder: Path) -> Any:
    """The settings of `python -m trainapp`."""
    from trainapp.config import compose

    overrides = [
        f"parallel={strategy}", f"parallel.devices={options.ranks}", "train.device=cpu",
        "model=gpt", "model.depth=4", f"model.width={options.width}", "model.heads=4", "model.context_length=64",
        "data=synthetic_tokens", "train.max_epochs=null", f"train.max_steps={total}", f"train.grad_clip={CLIP}",
        f"batch.global_size={SAMPLES}", f"batch.micro_size={MICRO}", f"optimizer.lr={LEARNING_RATE}",
        "optimizer.weight_decay=0.0", "schedule=constant", "schedule.warmup=0", f"every.log={options.steps}",
        "every.eval=null", "every.save=null", "checkpointing=off", "oom.grow=false",
    ]  # fmt: skip
    return compose.from_command_line(overrides, str(folder))


def trainapp(settings: Any, ranks: Any) -> tuple[Callable[[int], None], Callable[[], float]]:
    """trainapp's loop: `advance(steps)` and a function that returns the last loss."""
    from trainapp.run.prepare import SessionStart, prepare
    from trainapp.signals import StopRequest
    from trainapp.training import loop

    Path(settings.run_dir).mkdir(parents=True, exist_ok=True)
    run = prepare(SessionStart(settings), StopRequest(), ranks)
    found: list[float] = []
    log = run.tracker.log_step

    def once(step: int, samples: int, scalars: dict[str, float], metric: str) -> None:
        found.append(scalars["loss"])
        run.limits.log = 0  # the first round tells whether all do the same work
        log(step, samples, scalars, metric)

    run.tracker.log_step = once

    def advance(steps: int) -> None:
        for _ in range(steps):
            loop.train_step(run)

    return advance, lambda: found[-1]


def hand_written(strategy: str, settings: Any, ranks: Any, checked: int) -> tuple[Iterator[None], Callable[[], float]]:
    """A loop written for this one run: gradients reduced in the last micro-batch only, one clip, fused AdamW."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    from trainapp.config import schema
    from trainapp.data.sampler import Permutation
    from trainapp.parallel.ranks import SingleRank
    from trainapp.run.prepare import SessionStart, prepare
    from trainapp.signals import StopRequest

    single = copy.deepcopy(settings)
    single.parallel = schema.Parallel()
    run = prepare(SessionStart(single), StopRequest(), SingleRank())
    data, model, found = run.batches.dataset, run.state.model, []
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        for block in model.blocks():
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0, fused=True)

    def steps() -> Iterator[None]:
        epoch, step, share = 0, 0, SAMPLES // ranks.world_size
        while True:
            order = Permutation(0, len(data)).indices(epoch, 0, len(data))
            epoch += 1
            for start in range(0, len(order), SAMPLES):
                chunk = order[start : start + SAMPLES]
                a, b = (len(chunk) * r // ranks.world_size for r in (ranks.rank, ranks.rank + 1))
                own, totals = chunk[a:b], torch.zeros(2)
                for first in range(0, share, MICRO):
                    batch = data.__getitems__(own[first : first + MICRO])
                    last = first + MICRO >= share
                    quiet = contextlib.nullcontext() if last or strategy == "fsdp" else wrapped.no_sync()
                    with quiet:
                        logits = wrapped(batch["inputs"])
                        loss = functional.cross_entropy(
                            logits.float().flatten(0, 1), batch["targets"].flatten(), reduction="sum"
                        )
                        # DDP and FSDP2 average over ranks; all samples have the same number of tokens.
                        (loss * ranks.world_size / (len(chunk) * batch["targets"].shape[1])).backward()
                    totals += torch.tensor([loss.item(), batch["targets"].numel()])
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if step == checked:
                    dist.all_reduce(totals)
                    found.append(float(totals[0] / totals[1]))
                yield

    return steps(), lambda: found[-1]


if __name__ == "__main__":
    os.environ.setdefault("TRAINAPP_CACHE", tempfile.mkdtemp())
    main()
