"""What a plan is compared with: the peak of a real run, of models that a test defines."""

import sys

import runs

from trainapp.training import loop


def peak(run_dir, *overrides):
    """Bytes of three training steps."""
    run = runs.prepare(run_dir, *overrides)
    try:
        for _ in range(3):
            loop.train_step(run)
            loop.update_weight_average(run)
    finally:
        run.close()
    return run.memory.peak


def own_model(monkeypatch, folder, kind):
    """Overrides for a model class of a test file, as an option in a folder of the user's."""
    module = f"own_of_{kind.__module__.removeprefix('own_of_')}"
    monkeypatch.setitem(sys.modules, module, sys.modules[kind.__module__])
    monkeypatch.setattr(kind, "__module__", module)
    group = folder / "conf" / "model"
    group.mkdir(parents=True, exist_ok=True)
    (group / "own.yaml").write_text(f"_target_: {module}.{kind.__name__}\n")
    return ("model=own", f"user_packages=[{module}]", f"hydra.searchpath=[file://{folder / 'conf'}]")
