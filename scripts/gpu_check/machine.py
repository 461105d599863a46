"""What this machine is: python -m gpu_check.machine DEVICE prints it as JSON.

A process of its own: one that has started CUDA holds memory of the device until it ends.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import warnings
from typing import Any


def facts(device: str) -> dict[str, Any]:
    """Device, driver, versions, date. With `problem`, a message, where the steps cannot run."""
    import torch

    found: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    with warnings.catch_warnings(record=True) as caught:  # in which torch says that a driver is too old
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        found["problem"] = (
            f"torch sees no CUDA device here{''.join(f' ({warning.message})' for warning in caught)}; torch "
            f"{torch.__version__} is built for {built}, and the driver is {_driver()}. --device cpu runs what can be "
            "run without one"
        )
    elif device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["driver"], found["CUDA"], found["cuDNN"] = _driver(), torch.version.cuda, torch.backends.cudnn.version()
    return found | {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "revision": _first_line("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


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
