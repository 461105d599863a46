"""What a plan is compared with: the peaks of a real run, of models that a test defines."""

import sys

import runs

from trainapp.training import loop
from trainapp.training.evaluate import evaluate


def peaks(run_dir, *overrides):
    """Bytes of three training steps, and of an evaluation after them."""
    run = runs.prepare(run_dir, *overrides)
    try:
        for _ in range(3):
            loop.train_step(run)
            loop.update_weight_average(run)
        training, run.memory.peak = run.memory.peak, 0
        evaluate(run)
    finally:
        run.close()
    return training, run.memory.peak


def by_part(facts):
    """The same two of a plan."""
    phases = dict(facts["phases"])
    evaluation = phases.pop("evaluation")
    return max(phases.values()), evaluation


def own_model(monkeypatch, folder, kind):
    """Overrides for a model class of a test file, as an option in a folder of the user's."""
    module = f"own_of_{kind.__module__.removeprefix('own_of_')}"
    monkeypatch.setitem(sys.modules, module, sys.modules[kind.__module__])
    monkeypatch.setattr(kind, "__module__", module)
    group = folder / "conf" / "model"
    group.mkdir(parents=True, exist_ok=True)
    (group / "own.yaml").write_text(f"_target_: {module}.{kind.__name__}\n")
    return ("model=own", f"user_packages=[{module}]", f"hydra.searchpath=[file://{folder / 'conf'}]")
