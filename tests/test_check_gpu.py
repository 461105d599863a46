"""`scripts/check_gpu`: its steps run on the CPU as far as they can, and it notices whatever a step may do wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT, wait_until

SCRIPT = ROOT / "scripts" / "check_gpu"
PATHS = [str(ROOT / folder) for folder in ("scripts", "src", "tests", "tests/helpers", "benchmarks")]


def environment():
    return {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def check(*arguments, timeout=120):
    return subprocess.run([str(SCRIPT), *arguments], env=environment(), capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def package(monkeypatch):
    """The modules of the package."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    from gpu_check import __main__, machine, page

    return {"main": __main__, "machine": machine, "page": page}


def steps(package, *names):
    """Steps of tests/helpers/own_checks.py, each of one check."""
    return [
        package["page"].Step(name, f"about {name}", 30, f"tests/helpers/own_checks.py::test_{name}") for name in names
    ]


def rows_of(package, name, folder, seconds=30):
    outcome = package["main"].run_step(*steps(package, name), "cpu", folder, seconds)
    return [(row.check, row.expected, row.got, row.outcome) for row in outcome.rows]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_every_step_on_the_cpu(tmp_path):
    done = check("--device", "cpu", "--out", str(tmp_path), timeout=1400)
    found = json.loads((tmp_path / "gpu.json").read_text())
    logs = {path.stem: path.read_text()[-3000:] for path in (tmp_path / "steps").glob("*.log")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    outcomes = {step["step"]["name"]: {row["outcome"] for row in step["rows"]} for step in found["steps"]}
    assert {name for name, own in outcomes.items() if own == {"skipped"}} == {"tests", "tests_without"}
    assert all(own <= {"passed", "skipped"} for own in outcomes.values())
    # One line per step: name, verdict, seconds.
    for number, name in enumerate(outcomes, start=1):
        assert re.search(rf"^ ?{number}/{len(outcomes)} {name} +\S.* +[\d.]+ s$", done.stdout, re.MULTILINE), name
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"## {name}: " in page for name in outcomes)
    assert found["machine"]["torch"] in page


def test_the_steps_fit_ten_minutes_and_the_page_lists_them(package):
    """The page in the documentation is the one that says that nothing has run, or one that a run has written."""
    main, names = package["main"], [step.name for step in package["main"].STEPS]
    assert sum(step.seconds for step in main.STEPS) <= main.BUDGET < 600
    assert len(set(names)) == len(names)
    own = {path.stem.removeprefix("check_") for path in (ROOT / "scripts" / "gpu_check").glob("check_*.py")}
    assert own == {step.name for step in main.STEPS if step.path is None}
    page = (ROOT / "docs" / "gpu.md").read_text()
    if "not run yet" in page.lower():
        assert page == package["page"].Findings({}, "cuda", main.STEPS, []).page()
    else:
        assert all(f"## {name}: " in page for name in names)
        assert "| driver |" in page


@pytest.mark.slow
def test_what_a_step_may_do(package, tmp_path):
    good = rows_of(package, "good", tmp_path)
    assert good == [("test_good", "one and one is two", "2; on cpu | in test_good0", "passed")]
    missed = rows_of(package, "missed", tmp_path)
    assert missed == [("test_missed", "2", "3 | 4; ValueError: first line", "failed")]
    assert "second line" in (tmp_path / "missed.log").read_text()
    assert rows_of(package, "left_out", tmp_path) == [("test_left_out", "on a GPU", "needs CUDA", "skipped")]
    assert rows_of(package, "fails", tmp_path) == [("test_fails", "", "RuntimeError: no such thing", "failed")]
    ((_, _, got, outcome),) = rows_of(package, "crashes", tmp_path)
    assert got.startswith("exit code -11: ")
    assert outcome == "failed"


@pytest.mark.slow
def test_a_step_past_its_time_is_ended_with_all_its_processes(package, tmp_path):
    started = time.monotonic()
    ((check_name, _, got, _),) = rows_of(package, "never_ends", tmp_path, seconds=8)
    assert time.monotonic() - started < 20
    assert check_name == "the step ends by itself"
    assert got.startswith("stopped after")
    assert is_gone(tmp_path / "never_ends" / "child")


def is_gone(file):
    child = int(file.read_text())
    return not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (["good", "left_out"], 0, "1 passed, 1 skipped, in"),
        (["missed", "plain"], 1, "1 of 2 FAILED, in"),
        (["left_out"], 2, "nothing ran, 1 skipped, in"),
    ],
)
def test_the_exit_code_and_the_page(package, tmp_path, monkeypatch, capsys, names, code, said):
    """A failure does not stop the rest. `--only` leaves out steps."""
    chosen = ["check_gpu", "--device", "cpu", "--out", str(tmp_path), "--only", *names]
    monkeypatch.setattr(sys, "argv", chosen)
    assert package["main"].main(steps(package, *names, "crashes")) == code
    assert said.replace(", in", f"; {len(names)} of {len(names) + 1} steps run, in") in capsys.readouterr().out
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [step["step"]["name"] for step in found["steps"]] == names
    assert found["as_expected"] is {0: True, 1: False, 2: None}[code]
    page = (tmp_path / "gpu.md").read_text()
    if "missed" in names:
        assert "| test_missed | 2 | **3 \\| 4; ValueError: first line** |" in page
        assert "test_plain" not in page.replace("about plain", "")  # it passed, and has nothing to show
    if "good" in names:
        assert "| test_good | one and one is two | 2; on cpu" in page


@pytest.mark.slow
def test_without_a_gpu_it_says_what_to_do():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    before = (ROOT / "docs" / "gpu.md").read_text()
    done = check()
    assert done.returncode == 2
    assert done.stderr.startswith("check_gpu: torch sees no CUDA device here")
    assert f"torch {torch.__version__} is built for" in done.stderr
    assert "\n" not in done.stderr.strip()
    assert (ROOT / "docs" / "gpu.md").read_text() == before


@pytest.mark.slow
def test_a_signal_ends_the_step_and_keeps_what_there_is(tmp_path):
    """No process is left, and the page in the documentation is not replaced."""
    program = """if True:
        import signal, sys
        from gpu_check.__main__ import main
        from gpu_check.page import Step

        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it would be ignored
        names = ("good", "never_ends")
        sys.exit(main([Step(name, name, 60, f"tests/helpers/own_checks.py::test_{name}") for name in names]))
    """
    command = [sys.executable, "-c", program, "--device", "cpu", "--out", str(tmp_path)]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(PATHS)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    marker = tmp_path / "steps" / "never_ends" / "child"
    wait_until(lambda: marker.exists() and marker.read_text(), process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in printed
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [step["step"]["name"] for step in found["steps"]] == ["good"]
    assert is_gone(marker)
