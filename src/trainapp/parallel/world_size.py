"""How many ranks a run has on this machine, for the launcher and for a plan."""

import torch

from trainapp.config.schema import Config


def rank_count(config: Config) -> int:
    """Return the number of ranks that `parallel.devices` asks for. 0 if that is one per GPU, and there is none."""
    devices = config.parallel.devices
    if devices == "auto":
        return usable_gpu_count(config)
    return devices


def usable_gpu_count(config: Config) -> int:
    """Return the number of GPUs for this run: none with `train.device=cpu`."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()
