"""What `scripts/check_gpu` runs: each `check_*.py` and tests/gpu, by pytest, in a process of its own."""
