"""The devices of the ranks on this machine: how many workers to start, which device each of them takes, and the
backends of the collectives between such devices.
"""

import torch

from trainapp.config.excludes import require_several_ranks
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.parallel.world_size import rank_count, usable_gpu_count


def workers_to_start(config: Config) -> int:
    """Return the number of processes to start: one per GPU, or `parallel.devices`.

    Raises UserError if that is too many, or too few for the strategy.
    """
    devices = config.parallel.devices
    count = rank_count(config)
    if not count:
        raise UserError(
            "parallel.devices=auto: this machine has no GPUs; set parallel.devices=N for N processes on the CPU"
        )

    setting = f"parallel.devices={devices}"
    if devices == "auto":
        setting += f" (this machine has {count} GPU)"
    require_several_ranks(config, count, setting)

    gpu_count = usable_gpu_count(config)
    if gpu_count and count > gpu_count:  # without GPUs, any number of processes share the CPU
        raise UserError(f"{setting}: this machine has {gpu_count} GPUs")
    return count


def device_of_rank(config: Config, local_rank: int) -> torch.device:
    """Return the device of the rank with this number on its machine, and make it CUDA's current one.

    Raises UserError if there is no GPU for it, and for MPS, which has no collectives.
    """
    setting = config.train.device
    if setting == "mps":
        raise UserError("train.device=mps: one device only; use parallel=single")
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")

    # The GPU with the rank's number, of those that this process sees.
    gpu_count = torch.cuda.device_count()
    index = local_rank
    if gpu_count == 1 and environment.scheduler_task() is not None:
        index = 0  # srun --gpus-per-task makes only the task's own GPU visible to it
    if index >= gpu_count:
        raise UserError(f"local rank {local_rank}: this machine shows {gpu_count} GPUs; start one rank per GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def backend_of(config: Config, device: torch.device) -> str:
    """Return the backend of the default group and of the groups that meshes split from it.

    `cpu_offload` keeps gradients on the host and checks them for fp16 overflow there; NCCL has no collectives for host
    tensors.
    """
    if device.type != "cuda":
        return "gloo"
    if config.parallel.strategy == "fsdp" and config.parallel.fsdp.cpu_offload:
        return "cpu:gloo,cuda:nccl"
    return "nccl"
