"""What this machine is: python -m gpu_check.machine DEVICE prints it as JSON.

A process of its own: one that has started CUDA holds memory of the device until it ends.
"""

import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import warnings
from typing import Any

NEEDED = ("torch", "hydra", "omegaconf", "pydantic", "psutil", "numpy", "safetensors", "tensorboard", "matplotlib")
NEEDED += ("tqdm", "pytest", "pytest_timeout")
OLDEST_TORCH = (2, 11)


def missing() -> list[str]:
    """The packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def facts(device: str) -> dict[str, Any]:
    """Device, driver, versions, date. With `problem`, a message, where the steps cannot run."""
    import torch

    found: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        found["problem"] = f"torch {torch.__version__} is too old; install {'.'.join(map(str, OLDEST_TORCH))} or newer"
    elif device == "cuda" and (reason := _why_no_cuda()) is not None:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        found["problem"] = (
            f"torch sees no CUDA device here{reason}; torch {torch.__version__} is built for {built}, and the driver "
            f"is {_driver()}. --device cpu runs what can be run without one"
        )
    elif device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["free at the start"] = f"{torch.cuda.mem_get_info(0)[0] / 2**30:.1f} GiB"
        found["driver"] = _driver()
        found["CUDA"] = torch.version.cuda
        found["cuDNN"] = torch.backends.cudnn.version()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found | {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {cores} cores",
        "revision": _first_line("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _why_no_cuda() -> str | None:
    """None where there is a device. What keeps torch from one, it says in a warning: a driver that is too old."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return "".join(f" ({str(warning.message).strip()})" for warning in caught)


def _driver() -> str:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_line(*command: str) -> str:
    """What a command prints first; "unknown" where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=os.path.dirname(__file__))
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])))
