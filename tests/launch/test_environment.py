"""Which launcher started a process, by the names that Slurm 22.05 and submitit 1.5 actually set."""

import os
import re

import pytest
import torch

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.launch import devices, environment, launch

BATCH = {  # what a batch script with --ntasks=2 sees, before any srun
    "SLURM_JOB_ID": "12",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}
STEP = BATCH | {  # its second srun, on the second task
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "gpu7",
}
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def started_by(monkeypatch):
    """Sets these names and none of the schedulers' others; restored afterwards."""

    def set_names(names):
        for name in [n for n in os.environ if n.startswith(("SLURM_", "SUBMITIT_", "TORCHELASTIC_")) or n in TORCH]:
            monkeypatch.delenv(name)
        for name in TORCH:  # registers them for removal afterwards
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in names.items():
            monkeypatch.setenv(name, value)

    return set_names


def test_a_batch_script_without_srun_is_one_process(started_by):
    started_by(BATCH)
    assert environment.scheduler_task() is None
    assert not environment.is_one_of_many_ranks()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{6}", environment.default_run_name())
    environment.export_torch_variables()
    assert not any(name in os.environ for name in TORCH)


@pytest.mark.parametrize("mode", ["export", "generate", "lr_find"])
def test_a_mode_of_one_process_does_not_advise_ddp(started_by, mode):
    started_by(STEP)
    resume = [] if mode == "lr_find" else ["checkpointing.resume=run"]
    config = compose.from_command_line([f"mode={mode}", *resume, "generate.prompts=[a]"])
    with pytest.raises(UserError, match=f"^mode={mode}: .* started several processes; start it once$"):
        launch.launch(config)


@pytest.mark.parametrize(
    ("world_size", "advice"),
    [("1", "started this process as its only rank; start it without torchrun"), ("2", "choose parallel=ddp or")],
)
def test_single_inside_torchrun_says_what_to_do(started_by, world_size, advice):
    """On one rank no advice that is refused in turn: parallel=fsdp would be."""
    started_by({"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(UserError, match=f"^parallel=single: torchrun.* {advice}"):
        launch.launch(compose.from_command_line(["model=mlp", "parallel=single"]))


def test_a_step_of_srun(started_by):
    started_by(STEP)
    assert environment.scheduler_task() == environment.SchedulerTask(
        rank=1, world_size=2, local_rank=1, job="12.1", first_host="127.0.0.1"
    )
    assert environment.is_one_of_many_ranks()
    assert environment.default_run_name() == "slurm/12.1"
    environment.export_torch_variables()
    assert [os.environ[name] for name in TORCH] == ["1", "2", "1", "127.0.0.1", str(20000 + 12 + 1009)]


def test_each_step_has_a_port_of_its_own(started_by):
    ports = set()
    for step in range(10):
        started_by(STEP | {"SLURM_STEP_ID": str(step)})
        environment.export_torch_variables()
        ports.add(int(os.environ["MASTER_PORT"]))
    assert len(ports) == 10
    assert all(20000 <= port < 32000 for port in ports)


def test_one_task_of_srun_starts_its_own_workers(started_by):
    started_by(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert not environment.is_one_of_many_ranks()


def test_what_torchrun_set_stays(started_by):
    started_by(STEP | {"RANK": "5", "TORCHELASTIC_RUN_ID": "name"})
    assert environment.default_run_name() == "torchrun/name"
    environment.export_torch_variables()
    assert os.environ["RANK"] == "5"
    assert "MASTER_ADDR" not in os.environ


@pytest.mark.parametrize("shell", [{}, STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}])
def test_a_job_of_submitit(started_by, shell):
    """Also in a shell of srun."""
    names = {"GLOBALID": "1", "NTASKS": "2", "LOCALID": "1", "JOB_ID": "4711"}
    job = {f"SUBMITIT_LOCAL_{name}": value for name, value in names.items()} | {"SUBMITIT_EXECUTOR": "local"}
    started_by(shell | job)
    assert environment.scheduler_task() == environment.SchedulerTask(
        rank=1, world_size=2, local_rank=1, job="4711", first_host="127.0.0.1"
    )
    assert environment.is_one_of_many_ranks()
    assert environment.is_submitit_job()
    started_by(job | {"TORCHELASTIC_RUN_ID": "name"})  # torchrun inside of it
    assert not environment.is_submitit_job()


@pytest.mark.parametrize(("names", "there", "expected"), [(STEP, 1, 0), (STEP, 2, 1), ({}, 2, 1), ({}, 1, None)])
def test_the_gpu_of_a_rank(started_by, monkeypatch, names, there, expected):
    """The GPU of local rank 1. A task of srun may see only its own GPU; with torchrun there are too few."""
    started_by(names)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    settings = compose.from_command_line(["train.device=cuda"])
    if expected is None:
        with pytest.raises(UserError, match="this machine shows 1 GPUs"):
            devices.device_of_rank(settings, 1)
    else:
        assert devices.device_of_rank(settings, 1) == torch.device("cuda", expected)


@pytest.mark.parametrize(
    ("device", "overrides", "expected"),
    [
        ("cpu", ("parallel=fsdp", "parallel.fsdp.cpu_offload=true"), {"cpu": "gloo"}),
        ("cuda", ("parallel=ddp",), {"cuda": "nccl"}),
        ("cuda", ("parallel=fsdp",), {"cuda": "nccl"}),
        ("cuda", ("parallel=fsdp", "parallel.fsdp.cpu_offload=true"), {"cpu": "gloo", "cuda": "nccl"}),
    ],
)
def test_the_backends_that_ranks_talk_through(device, overrides, expected):
    """Gradients in the host's memory need one that NCCL is not."""
    backend = devices.backend_of(compose.from_command_line(overrides), torch.device(device))
    by_device = torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend(backend))
    found = by_device.get_device_backend_map()
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-010,12],cpu1", "gpu003"),
        ("a[1,5-7]-ib,b2", "a1-ib"),
        ("r[1-2]n[01-16]", "r1n01"),
    ],
)
def test_rank_0_is_on_the_first_node(started_by, nodes, first):
    started_by(STEP | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": nodes})
    assert environment.scheduler_task().first_host == first
