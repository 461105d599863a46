"""Every benchmark runs with tiny settings and prints its tables. Timings are not asserted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> str:
    """What a benchmark prints."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(printed: str) -> dict[str, list[str]]:
    """The tables' rows by their first cell."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in printed.splitlines() if "|" in line]
    return {first: others for first, *others in cells}


@pytest.mark.slow
def test_overhead_compares_loops_that_do_the_same_work(tmp_path):
    arguments = ["--cases", "small", "--width", "16", "--rounds", "2", "--steps", "50", "--json", str(tmp_path / "j")]
    found = rows(run("overhead.py", *arguments))
    for loop in ("trainapp", "samples one by one", "one by one, AdamW not fused"):
        milliseconds, steps_per_second, ratio, *_ = (float(cell) for cell in found[loop][:3])
        # Printed with three digits after the decimal point.
        assert steps_per_second == pytest.approx(1000 / milliseconds, rel=0.02)
        assert ratio > 0
    assert found["hand-written"][2] == "1.000"
    ratios = json.loads((tmp_path / "j").read_text())["small"]["trainapp"]["ratios"]
    assert len(ratios) == 2


@pytest.mark.nightly
def test_precisions_are_compared_with_fp32():
    printed = run("precision_speed.py", "--cases", "resnet", "--rounds", "1", "--steps", "1", "--threads", "1")
    table = rows(printed)
    assert table["fp32"][1] == "1.00"
    assert float(table["bf16"][1]) > 0
    assert float(table["fp16"][1]) > 0


@pytest.mark.slow
def test_emulated_operators_agree_with_torchs_own():
    table = rows(run("precision_speed.py", "--operators", "--threads", "1"))
    differences = []
    for cells in table.values():
        differences += [cell for cell in (cells[3], cells[6]) if re.fullmatch(r"\d\.\de[+-]\d+", cell)]
    assert len(differences) >= 18
    assert max(map(float, differences)) < 0.01


def test_a_loop_that_does_other_work_is_found_out(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overhead

    losses = {1: 0.5, 2: 0.25}
    same, other, fewer = (
        overhead.Contender(name, lambda steps: None, lambda found=found: found)
        for name, found in (("same", {1: 0.5 + 1e-7, 2: 0.25}), ("other", {1: 0.501, 2: 0.25}), ("fewer", {1: 0.5}))
    )
    reference = overhead.Contender(overhead.REFERENCE, lambda steps: None, lambda: losses)
    overhead.check_same_work([reference, same])
    for wrong in (other, fewer):
        with pytest.raises(RuntimeError, match=wrong.name):
            overhead.check_same_work([reference, wrong])


@pytest.mark.slow
def test_startup_prints_its_tables_and_help_is_without_torch():
    found = rows(run("startup.py", "--runs", "1"))
    for command in ("trainapp --help", "trainapp --cfg job"):
        assert found[command][1] == "no", found[command]
    # With one run the quartiles equal its seconds, printed with two digits.
    bare, app, difference = (float(found[name][1]) for name in ("bare script", "trainapp model=mlp", "difference"))
    assert difference == pytest.approx(app - bare, abs=0.011)
    assert "import hydra" in found
    assert "import torch" not in found  # the bare script imports it, too


@pytest.mark.nightly
def test_ranks_compares_loops_that_do_the_same_work(tmp_path):
    found = rows(run("ranks.py", "--rounds", "2", "--steps", "3", "--width", "16", "--json", str(tmp_path / "j")))
    assert float(found["trainapp, votes"][1]) > 0
    seconds = json.loads((tmp_path / "j").read_text())
    assert {len(own) for strategy in ("ddp", "fsdp") for own in seconds[strategy].values()} == {2}


@pytest.mark.nightly
def test_soak_ends_as_the_undisturbed_run():
    printed = run("soak.py", "--kills", "1", "--steps", "60")
    assert "steps lost 0, steps repeated 0" in printed
    assert "equal bit for bit: losses True, evaluations True, weights True" in printed


@pytest.mark.slow
def test_the_plan_is_as_accurate_as_the_documentation_says(tmp_path):
    found = rows(run("plan_accuracy.py", "--only", "optimizer=sgd", "--json", str(tmp_path / "j")))
    assert set(found) >= {"mlp", "gpt", "resnet"}
    for model in ("mlp", "gpt", "resnet"):
        assert found[model][:4] == ["1", "1", "1", "0.000%"], found[model]
    assert len(json.loads((tmp_path / "j").read_text())) == 3


def test_foreign_plans_must_be_near_and_within_their_margin(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from plan_accuracy import foreign_is_good

    near = [{"error": 0.01, "is_inside": True}] * 9
    assert foreign_is_good([*near, {"error": 0.08, "is_inside": True}])
    assert not foreign_is_good([*near, {"error": 0.15, "is_inside": False}])
    assert not foreign_is_good([*near[1:], *[{"error": 0.08, "is_inside": True}] * 2])


@pytest.mark.slow
def test_precision_curves_have_every_run(tmp_path):
    picture = tmp_path / "curves.png"
    found = rows(run("precision_curves.py", "--steps", "10", "--width", "16", "--to", str(picture)))
    finals = {name: float(loss) for name, (loss, _) in found.items() if name.startswith("precision")}
    assert len(finals) == 5
    assert len(set(finals.values())) > 1  # they are runs of different precision
    assert all(4 < loss < 6 for loss in finals.values())
    assert picture.stat().st_size > 1000


@pytest.mark.nightly
def test_scale_measures_small_and_large_alike(tmp_path):
    found = rows(run("scale.py", "--sizes", "1000", "100000000", "--runs", "1", "--json", str(tmp_path / "j")))
    assert float(found["1e+08"][0]) < 100  # milliseconds
    measured = json.loads((tmp_path / "j").read_text())
    assert measured["orders"]["100000000"][0]["memory"] < 20  # MiB
    memory = [measured["runs"][size][0]["memory"] for size in ("1000", "100000000")]
    assert memory[1] < 1.2 * memory[0]
    assert "100000000" not in measured["lists"]
