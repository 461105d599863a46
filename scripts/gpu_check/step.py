"""One step in a process of its own: python -m gpu_check.step FUNCTION --device DEVICE --folder FOLDER --rows FILE"""

import argparse
import importlib
import logging
from pathlib import Path

from .table import Table


def main() -> None:
    """Import the step and let it fill its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what the runs say goes to the step's log
    module, _, name = options.function.partition(":")
    check = getattr(importlib.import_module(module), name)
    check(Table(options.rows), options.device, options.folder)


if __name__ == "__main__":
    main()
