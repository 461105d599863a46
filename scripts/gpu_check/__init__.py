"""`scripts/check_gpu`: what only a GPU can show, step by step. `plan.py` lists the steps."""
