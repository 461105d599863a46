"""The table at the end of a multirun of plans."""

import json

from helpers import run_cli
from runs import MODELS

from trainapp.units import bytes_text

GPT = (*MODELS["gpt"], "train.device=cpu", "plan.levers=false")
SWEEP = ("-m", "mode=plan", *GPT, "hydra.sweep.dir=sweep")


def rows(done):
    """The lines of the table, without its header."""
    lines = done.stdout.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("job ")]
    return lines[first + 1 :]


def test_a_refused_configuration_is_a_row_with_its_reason(tmp_path):
    done = run_cli(*SWEEP, "model.width=16,17,-1", cwd=tmp_path)
    assert done.returncode == 2
    facts = json.loads((tmp_path / "sweep/0/plan.json").read_text())
    fits, refused, invalid = rows(done)
    assert fits.split() == ["0", *bytes_text(facts["peak_bytes"]).split(), "exact", "64", "40", "model.width=16"]
    # Once by the planner's process and once by the configuration's own rules.
    assert refused.split()[:6] == ["1", "-", "refused", "-", "-", "model.width=17"]
    assert refused.endswith("  model.width=17 must be divisible by model.heads=2")
    assert invalid.endswith("model.width=-1  model.width=-1: must be greater than 0")
    assert done.stderr == "trainapp: mode=plan: 2 of 3 configurations refused, see the table\n"
    assert done.stdout.count("must be") == 2  # each reason once


def test_plans_of_an_earlier_sweep_are_not_in_the_table(tmp_path):
    for widths in ("16,32", "8"):
        done = run_cli(*SWEEP, f"model.width={widths}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [row.split()[0] for row in rows(done)] == ["0"]
    assert "model.width=8" in rows(done)[0]  # with a single job all of its overrides
    assert (tmp_path / "sweep/1/plan.json").exists()
