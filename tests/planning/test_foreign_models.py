"""Models of others, from `benchmarks/plan_accuracy.py --foreign`: the plan meets the run, or says that it may not."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("data.size=24", "data.val_size=8", "batch.global_size=8")
CASES = {
    "LSTM": ("Recurrent", "TOKENS", (), "probed"),
    "LSTM, both directions": ("Recurrent", "TOKENS", ("bidirectional=true", "width=100"), "probed"),
    "tied weights": ("Tied", "TOKENS", (), "exact"),
    "U-Net": ("UNet", "IMAGES", (), "exact"),
    "ConvNeXt": ("ConvNeXt", "IMAGES", (), "exact"),  # has a module that is called blocks
    "experts": ("Experts", "TOKENS", (), "range"),
    "early exit": ("EarlyExit", "IMAGES", (), "range"),
    "early exit at once": ("EarlyExit", "IMAGES", ("sure=0",), "range"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("one_thread")
def test_the_plan_of_a_foreign_model_is_exact_or_a_range(monkeypatch, name):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _foreign
    import plan_accuracy

    kind, data, arguments, certainty = CASES[name]
    overrides = (*_foreign.model(f"foreign_models.{kind}", getattr(_foreign, data), *arguments), *SMALL)
    facts = plan_accuracy.planned(overrides)
    real = plan_accuracy.measured(overrides, facts["micro_size"], facts["eval_micro_size"])
    found = plan_accuracy.compared(name, overrides, facts, *real)
    assert found["certainty"] == certainty
    assert found["is_inside"] if certainty == "range" else found["is_exact"], found
