"""`scripts/check_gpu`: its steps run on the CPU as far as they can, and it notices whatever a step may do wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import runs
from helpers import ROOT

SCRIPT = ROOT / "scripts" / "check_gpu"
PATHS = [str(ROOT / folder) for folder in ("scripts", "src", "tests", "tests/helpers", "benchmarks")]


def environment():
    return {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def check(*arguments, timeout=120):
    return subprocess.run([str(SCRIPT), *arguments], env=environment(), capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def gpu_check(monkeypatch):
    """The package, and steps of tests/helpers/own_checks.py."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
    import gpu_check
    from gpu_check import __main__, machine, plan, report, table

    class Package:
        main, run_step = staticmethod(__main__.main), staticmethod(__main__.run_step)

        @staticmethod
        def step(name, seconds=30):
            return plan.Step(name, f"about {name}", seconds, f"own_checks:{name}")

    Package.plan, Package.report, Package.machine, Package.table = plan, report, machine, table
    assert Path(gpu_check.__file__).is_relative_to(ROOT)
    return Package


def run(gpu_check, name, folder, seconds=30):
    return gpu_check.run_step(gpu_check.step(name), "cpu", folder, seconds)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_every_step_on_the_cpu(tmp_path):
    done = check("--device", "cpu", "--out", str(tmp_path), timeout=1400)
    found = json.loads((tmp_path / "gpu.json").read_text())
    logs = {path.stem: path.read_text()[-3000:] for path in (tmp_path / "steps").glob("*.log")}
    wrong = [
        (step["step"]["name"], row) for step in found["steps"] for row in step["rows"] if row["verdict"] == "not met"
    ]
    assert not wrong, (wrong, {name: logs[name] for name, _ in wrong})
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["as_expected"] is True
    verdicts = {step["step"]["name"]: [row["verdict"] for row in step["rows"]] for step in found["steps"]}
    only_cuda = {name for name, own in verdicts.items() if set(own) == {"needs CUDA"}}
    assert only_cuda == {"tests", "waiting"}
    assert all(verdicts.values())
    # One line per step: name, verdict, seconds.
    for number, name in enumerate(verdicts, start=1):
        assert re.search(rf"^ ?{number}/{len(verdicts)} {name} +\S.* +[\d.]+ s$", done.stdout, re.MULTILINE), name
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"## {name}: " in page for name in verdicts)
    assert found["machine"]["torch"] in page


def test_the_plan_fits_ten_minutes_and_names_real_functions(gpu_check):
    plan = gpu_check.plan
    assert sum(step.seconds for step in plan.STEPS) <= plan.BUDGET < 600
    assert len({step.name for step in plan.STEPS}) == len(plan.STEPS)
    for step in plan.STEPS:
        module, _, function = step.entry.partition(":")
        text = (ROOT / "scripts" / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(table: Table, device: str, folder: Path)" in text


def test_the_page_in_the_documentation_lists_every_step(gpu_check):
    """It is the one that says that nothing has run, or one that a run has written."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    if "not run yet" in page.lower():
        assert page == gpu_check.report.page()
    else:
        assert all(f"## {step.name}: " in page for step in gpu_check.plan.STEPS)
        assert "| driver |" in page


def test_a_good_step(gpu_check, tmp_path):
    outcome = run(gpu_check, "good", tmp_path)
    assert [row.verdict for row in outcome.rows] == ["met", "measured"]
    assert outcome.verdict == "as expected (1)"
    assert (tmp_path / "good" / "file").read_text() == "cpu"


def test_what_a_step_may_do_wrong(gpu_check, tmp_path):
    missed = run(gpu_check, "missed", tmp_path)
    assert missed.verdict == "1 of 1 NOT as expected"
    part = run(gpu_check, "raises_in_part", tmp_path)
    assert [row.verdict for row in part.rows] == ["not met", "met"]
    assert part.rows[0].got == "ValueError: first line"
    assert "second line" in (tmp_path / "raises_in_part.log").read_text()
    crash = run(gpu_check, "crashes", tmp_path)
    assert [(row.check, row.verdict) for row in crash.rows] == [
        ("before", "met"),
        ("the step ends by itself", "not met"),
    ]
    assert crash.rows[1].got.startswith("signal 11")
    failed = run(gpu_check, "fails", tmp_path)
    assert failed.rows[-1].got == "exit code 1: RuntimeError: no such thing"
    cuda = run(gpu_check, "needs_cuda", tmp_path)
    assert (cuda.verdict, cuda.count("not met")) == ("needs CUDA", 0)


@pytest.mark.slow
def test_a_step_past_its_time_is_ended_with_all_its_processes(gpu_check, tmp_path):
    started = time.monotonic()
    outcome = run(gpu_check, "never_ends", tmp_path, seconds=8)
    assert time.monotonic() - started < 20
    assert [row.check for row in outcome.rows] == ["before", "the step ends by itself"]
    assert outcome.rows[1].got.startswith("stopped after")
    child = int((tmp_path / "never_ends" / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_configurations_that_are_planned_compose(gpu_check):
    """With their large sizes, too; and what is not in a plan is labelled."""
    from gpu_check import planned

    assert len(planned.CASES) >= 20
    assert len(set(planned.CASES)) == len(planned.CASES)
    for device in ("cpu", "cuda"):
        for model, chosen in planned.CASES:
            config = runs.configure(Path("unused"), *planned.overrides(device, model, chosen))
            assert (config.train.device, config.train.max_steps) == (device, planned.STEPS)
            assert config.plan.techniques is False
    assert f"of {len(planned.CASES)} runs" in next(s.about for s in gpu_check.plan.STEPS if s.name == "planned_peaks")


def test_how_good_a_plan_is(gpu_check):
    from gpu_check import planned

    facts = {"method": "traced", "peak_bytes": 99 * 2**20}
    both = planned.compared("a", facts, SimpleNamespace(peak_memory_bytes=100 * 2**20, peak_reserved_bytes=120 * 2**20))
    assert both.error == pytest.approx(-0.01)
    assert both.text == "allocated 99.0 for 100.0 MiB (-1.00%), reserved 120"
    with pytest.raises(RuntimeError, match="no estimate"):
        planned.compared("b", {"method": None, "notes": ["because"]}, None)
    assert planned.summary([0.001, -0.04, 0.0]) == ("median 0.10%, worst 4.00%, of 3", True)
    assert planned.summary([0.001, -0.06, 0.0])[1] is False
    assert planned.summary([0.02, -0.02, 0.0])[1] is False
    assert planned.summary([]) == ("nothing was compared", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (["good", "needs_cuda"], 0, "All that was expected was found (1 checks); 1 left out, for want of CUDA"),
        (["missed", "good"], 1, "Not as expected: 1 of 2 checks, in"),
        (["needs_cuda"], 2, "Nothing was checked; 1 left out, for want of CUDA"),
        (["fails", "good"], 1, "got       exit code 1: RuntimeError: no such thing"),
    ],
)
def test_the_exit_code_and_the_table(gpu_check, tmp_path, monkeypatch, capsys, names, code, said):
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--device", "cpu", "--out", str(tmp_path)])
    assert gpu_check.main([gpu_check.step(name) for name in names]) == code
    printed = capsys.readouterr().out
    assert said in printed
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [step["step"]["name"] for step in found["steps"]] == names  # a failure does not stop the rest
    assert found["as_expected"] is {0: True, 1: False, 2: None}[code]
    page = (tmp_path / "gpu.md").read_text()
    if "missed" in names:
        assert "| one and one | 2 | **3 \\| 4** |" in page
    if "good" in names:
        assert "| seconds | (measured) | 0.1 |" in page


@pytest.mark.slow
def test_only_some_steps(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--device", "cpu", "--only", "good", "--out", str(tmp_path)])
    assert gpu_check.main([gpu_check.step(name) for name in ("missed", "good")]) == 0
    assert [step["step"]["name"] for step in json.loads((tmp_path / "gpu.json").read_text())["steps"]] == ["good"]


def test_a_mistake_is_one_message():
    done = check("--only", "no_such_step")
    assert done.returncode == 2
    assert re.search(r"invalid choice: 'no_such_step' \(choose from .*convolutions", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    before = (ROOT / "docs" / "gpu.md").read_text()
    done = check()
    assert done.returncode == 2
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    assert done.stderr.startswith("check_gpu: torch sees no CUDA device here")
    assert f"torch {torch.__version__} is built for {built}, and the driver is" in done.stderr
    assert "\n" not in done.stderr.strip()
    assert (ROOT / "docs" / "gpu.md").read_text() == before


def test_why_torch_sees_no_device_is_said(gpu_check, monkeypatch):
    import torch

    def is_available():
        warnings.warn("The NVIDIA driver on your system is too old (found version 12040).", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert "here (The NVIDIA driver on your system is too old (found" in gpu_check.machine.facts("cuda")["problem"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_step_and_keeps_what_there_is(tmp_path, number):
    """No process is left, and the page in the documentation is not replaced."""
    program = """if True:
        import signal, sys
        from gpu_check.__main__ import main
        from gpu_check.plan import Step

        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it would be ignored
        steps = [Step(name, name, 60, f"own_checks:{name}") for name in ("good", "never_ends")]
        sys.exit(main(steps))
    """
    command = [sys.executable, "-c", program, "--device", "cpu", "--out", str(tmp_path)]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(PATHS)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    marker = tmp_path / "steps" / "never_ends" / "child"
    until = time.monotonic() + 60
    while not (marker.exists() and marker.read_text()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in printed
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [step["step"]["name"] for step in found["steps"]] == ["good"]
    child = int(marker.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
