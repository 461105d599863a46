"""One rank: NCCL's groups, FSDP2's mesh, rewrapping DDP, checkpoints in the background. On the CPU over gloo."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from gpu import on_gpu
from parallel.pool import free_port

from gpu_check import jobs
from trainapp.config import compose
from trainapp.config.schema import Ddp, Fsdp
from trainapp.launch import worker
from trainapp.losses import losses
from trainapp.models.inspect import blocks_of
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import SingleDevice
from trainapp.training.session import Session


def test_through_the_launcher(tmp_path, device, got):
    """out of memory at least once, checkpoints in the background; the same command again continues"""
    settings = (
        *jobs.overrides(device, "gpt", "parallel=ddp", "parallel.devices=1", "every.save=2"),
        "checkpointing.asynchronous=true",
    )
    free = jobs.unlimited(tmp_path / "free", *jobs.overrides(device, "gpt", "train.max_steps=2"))
    limit = f"memory.limit={on_gpu.limit_between(free, 0.4)}"
    first, second = (
        on_gpu.launched(tmp_path / "run", *settings, limit, f"train.max_steps={steps}") for steps in (4, 6)
    )
    got(f"{first.steps} steps, {first.oom_restarts} errors; {second.steps} steps, {second.samples} samples")
    assert first.steps == 4
    assert first.oom_restarts > 0
    assert first.checkpoint.endswith("step_00000004")
    assert (second.steps, second.samples) == (6, 6 * free.samples // 2)


@pytest.fixture(scope="module")
def ranks(request) -> Iterator[Ranks]:
    """In this process, after the launcher's."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in names.items()})
    device = request.config.getoption("--device")
    config = compose.from_command_line(jobs.overrides(device, "gpt", "parallel=ddp", "train.max_steps=1"))
    with worker.process_group(config) as own:
        yield own


def test_collectives(ranks):
    """each returns what one rank has, in every group of the program: the gradients', votes, side, saving"""
    value = torch.arange(4.0, device=ranks.device)
    assert torch.equal(ranks.all_reduce_sum(value), value)
    assert ranks.all_reduce_max(2, 5) == [2, 5]
    assert ranks.all_gather_object({"a": 1}) == [{"a": 1}]
    assert ranks.vote(False) is False


def test_ddp_rewrapped_after_aborted_steps(tmp_path, device, got, ranks):
    """the gradients of one device to 1e-5; memory grows by 1 MiB at most over 10 times"""
    wanted, session, batch = reference(device, tmp_path)
    strategy, used = DDP(session.state.model, ranks, Ddp()), []
    for _ in range(10):
        found = gradients(strategy, batch)
        strategy.abort_step()
        used.append(jobs.live_bytes(device))
    error = runs.relative_error(found, wanted)
    got(f"{error:.1e}, {jobs.text(used[-1] - used[0])}")
    session.close()
    assert error <= 1e-5
    assert used[-1] - used[0] <= on_gpu.MIB


def test_fsdp_on_a_mesh(tmp_path, device, got, ranks):
    """the gradients of one device to 1e-5, also after an aborted step, where torch can abort one"""
    wanted, session, batch = reference(device, tmp_path)
    strategy = FSDP(session.state.model, blocks_of(session.state.model, ""), ranks, Fsdp(), torch.float32)
    errors = [runs.relative_error(gradients(strategy, batch), wanted)]
    if strategy.recovers_in_place:
        strategy.abort_step()
        errors.append(runs.relative_error(gradients(strategy, batch), wanted))
    got(", ".join(f"{error:.1e}" for error in errors))
    session.close()
    assert max(errors) <= 1e-5


def reference(device: str, folder: Path) -> tuple[torch.Tensor, Session, Any]:
    """The gradients of a batch on one device, the run with the model, and the batch."""
    settings = jobs.overrides(device, "gpt", "train.max_steps=1", "checkpointing=off", "model.dropout=0.0")
    session = runs.prepare(folder, *settings, "batch.micro_size=16")
    batch = next(session.batches.micro_batches(session.state.progress, [16])).data
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
