"""One rank: NCCL's groups, FSDP2's mesh, rewrapping DDP, checkpoints in the background. On the CPU over gloo."""

import os
from pathlib import Path
from typing import Any

import runs
import torch
from gpu import on_gpu
from parallel.pool import free_port

from trainapp.config import compose
from trainapp.config.schema import Ddp, Fsdp
from trainapp.launch import worker
from trainapp.losses import losses
from trainapp.models.inspect import blocks_of
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import DistributedRanks
from trainapp.parallel.strategy import SingleDevice
from trainapp.training.session import Session

from .. import jobs
from ..table import Table

REWRAPS = 10


def check(table: Table, device: str, folder: Path) -> None:
    """The launcher first, in processes of its own; then the parts, in this process."""
    backend = "NCCL" if device == "cuda" else "gloo"
    with table.attempt(f"a run through the launcher over {backend}", "recovers and resumes"):
        through_the_launcher(table, device, folder, backend)
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in names.items()})
    config = compose.from_command_line(jobs.overrides(device, "gpt", "parallel=ddp", "train.max_steps=1"))
    with worker.process_group(config) as ranks:
        with table.attempt(f"collectives over {backend}", "each returns what one rank has"):
            collectives(table, ranks, backend)
        with table.attempt("DDP", "the gradients of one device"):
            rewrapped(table, device, folder, ranks)
        with table.attempt("FSDP2 on a mesh of one rank", "the gradients of one device"):
            on_a_mesh(table, device, folder, ranks)


def through_the_launcher(table: Table, device: str, folder: Path, backend: str) -> None:
    """Out of memory in one rank, checkpoints in the background; then resumed."""
    settings = (
        *jobs.overrides(device, "gpt", "parallel=ddp", "parallel.devices=1"),
        "checkpointing.asynchronous=true",
        "every.save=2",
    )
    free = jobs.unlimited(folder / "free", *jobs.overrides(device, "gpt", "train.max_steps=2"))
    limit = f"memory.limit={on_gpu.limit_between(free, 0.4)}"
    result = on_gpu.launched(folder / "run", *settings, limit, "train.max_steps=4")
    table.expect(
        f"a run through the launcher over {backend}",
        "4 steps, at least 1 error, a checkpoint of step 4",
        f"{result.steps} steps, {jobs.errors(result.oom_restarts)}, {Path(result.checkpoint).name}",
        result.steps == 4 and result.oom_restarts > 0 and result.checkpoint.endswith("step_00000004"),
    )
    result = on_gpu.launched(folder / "run", *settings, limit, "train.max_steps=6")
    expected = f"6 steps, {6 * free.samples // 2} samples"
    got = f"{result.steps} steps, {result.samples} samples"
    table.expect("the same command again", expected, got, got == expected)


def collectives(table: Table, ranks: DistributedRanks, backend: str) -> None:
    """Every group of the program: the gradients', votes, side, saving."""
    value = torch.arange(4.0, device=ranks.device)
    found: list[Any] = [
        torch.equal(ranks.all_reduce_sum(value), value),
        ranks.all_reduce_min(3) == 3,
        ranks.all_reduce_max(2, 5) == [2, 5],
        ranks.all_gather_object({"a": 1}) == [{"a": 1}],
        ranks.vote(False) is False,
    ]
    ranks.barrier()
    got = f"{sum(found)} of {len(found)}"
    table.expect(f"collectives over {backend}", "each returns what one rank has", got, all(found))


def rewrapped(table: Table, device: str, folder: Path, ranks: DistributedRanks) -> None:
    """DDP's gradients before and after, and memory over, REWRAPS aborted steps."""
    wanted, session, batch = reference(device, folder / "ddp")
    strategy = DDP(session.state.model, ranks, Ddp())
    used = []
    for _ in range(REWRAPS):
        found = gradients(strategy, batch)
        strategy.abort_step()
        used.append(jobs.live_bytes(device))
    error = runs.relative_error(found, wanted)
    name = f"DDP, rewrapped after each of {REWRAPS} aborted steps"
    table.expect(name, "the gradients of one device to 1e-5", f"{error:.1e}", error <= 1e-5)
    growth = used[-1] - used[0]
    name = "memory after the last rewrapping, less that after the first"
    table.expect(name, "at most 1 MiB", jobs.text(growth), growth <= on_gpu.MIB)
    session.close()


def on_a_mesh(table: Table, device: str, folder: Path, ranks: DistributedRanks) -> None:
    """FSDP2's gradients, and whether a step can be aborted in place."""
    wanted, session, batch = reference(device, folder / "fsdp")
    strategy = FSDP(session.state.model, blocks_of(session.state.model, ""), ranks, Fsdp(), torch.float32)
    found = gradients(strategy, batch)
    error = runs.relative_error(found, wanted)
    table.expect("FSDP2 on a mesh of one rank", "the gradients of one device to 1e-5", f"{error:.1e}", error <= 1e-5)
    if strategy.recovers_in_place:
        strategy.abort_step()
        error = runs.relative_error(gradients(strategy, batch), wanted)
        table.expect("FSDP2 after an aborted step", "the same gradients to 1e-5", f"{error:.1e}", error <= 1e-5)
    else:
        table.measured("FSDP2 after an aborted step", f"torch {torch.__version__} cannot abort one: workers restart")
    session.close()


def reference(device: str, folder: Path) -> tuple[torch.Tensor, Session, Any]:
    """The gradients of a batch on one device, the run with the model, and the batch."""
    settings = jobs.overrides(device, "gpt", "train.max_steps=1", "checkpointing=off", "model.dropout=0.0")
    session = runs.prepare(folder, *settings, "batch.micro_size=16")
    batch = next(session.batches.micro_batches(session.state.progress, 16)).data
    wanted = gradients(session.strategy, batch)
    session.state.model.zero_grad(set_to_none=True)
    return wanted, session, batch


def gradients(strategy: SingleDevice, batch: Any) -> torch.Tensor:
    """The gradients of the summed loss of a batch as one vector (a copy); those before it are dropped."""
    strategy.model.zero_grad(set_to_none=True)
    with strategy.micro_batch(True):
        loss, *_ = strategy.compute(losses.next_token, batch)
        loss.backward()
    strategy.finish_accumulation()
    found = [p.grad for p in strategy.model.parameters() if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    return torch.cat([g.flatten().clone() for g in whole])
