"""The plan from the command line and from Python."""

import json
import os
import sys
import time
from dataclasses import asdict, replace

import psutil
import pytest
import runs
from helpers import result, run_cli

import trainapp
from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.planning import printed, process

GPT = (*runs.MODELS["gpt"], "train.device=cpu", "batch.global_size=32", "plan.techniques=false")


@pytest.mark.slow
def test_mode_plan_prints_and_writes_the_plan(tmp_path):
    done = run_cli("mode=plan", *GPT, "memory.limit=300KB", "plan.techniques=true", "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert facts["method"] == "traced"
    assert facts["limit_bytes"] == 300_000
    assert 0 < facts["largest_micro_size"] < 32
    assert facts["peak_bytes"] == max(facts["phases"].values()) == sum(facts["categories"].values()) <= 300_000
    assert set(facts["phases"]) >= {"forward", "backward", "clip", "optimizer_step"}
    assert facts["techniques"]
    last = done.stdout.splitlines()[-1]
    assert last == facts["best"]["overrides"]
    assert last == f"batch.micro_size={facts['best']['micro_size']}"
    assert facts["best"]["micro_size"] == facts["largest_micro_size"]
    assert done.stdout.count("peak by phase") == 1
    for entry in facts["techniques"]:  # each is logged when it has been tried
        assert f" with {entry['overrides']}\n" in (tmp_path / "here/plan.log").read_text()
    assert (tmp_path / "here/plan.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "here/metrics.jsonl").exists()
    # What it says to paste runs within the limit without an error.
    done = run_cli(
        *GPT, "memory.limit=300KB", *last.split(), "train.max_steps=3", "train.max_epochs=null", "every.eval=null",
        "every.log=1", "oom=off", "hydra.run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["peak_memory_bytes"] <= 300_000


@pytest.mark.slow
def test_the_process_of_the_command_line_does_not_import_torch(tmp_path):
    code = "import sys; from trainapp.__main__ import main; main(); assert 'torch' not in sys.modules"
    done = run_cli("mode=plan", *GPT, cwd=tmp_path, command=(sys.executable, "-c", code))
    assert done.returncode == 0, done.stderr
    assert "batch.micro_size=32" in done.stdout


@pytest.mark.slow
def test_from_python_the_same_facts_and_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = trainapp.plan([*GPT, "batch.micro_size=4"])
    assert facts["micro_size"] == 4
    assert facts["method"] == "traced"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AttributeError, match="plam"):
        trainapp.plam  # noqa: B018


NET = (
    "from torch import nn\n"
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.linear = nn.Linear(64, 10)\n"
    "    def forward(self, inputs):\n"
    "        return self.linear(inputs.flatten(1))\n"
)


@pytest.mark.slow
def test_options_of_ones_own_from_python(tmp_path):
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/beside_its_yaml.py").write_text(NET)
    (tmp_path / "own/model/mine.yaml").write_text("_target_: beside_its_yaml.Net\n")
    overrides = ["model=mine", "user_packages=[beside_its_yaml]", "train.device=cpu", "plan.techniques=false"]
    before = list(sys.path)
    facts = trainapp.plan(overrides, config_dir=tmp_path / "own")
    assert sys.path == before
    done = run_cli("--config-dir=own", "mode=plan", *overrides, "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert facts["peak_bytes"] == json.loads((tmp_path / "here/plan.json").read_text())["peak_bytes"]
    with pytest.raises(UserError, match=r"^model=mine: no such option; available: gpt, hf, mlp, resnet, vit$"):
        trainapp.plan(overrides)


@pytest.mark.parametrize(
    "mistake",
    ["model=nope", "train.max_steps=${nope}", "model=[", pytest.param("model.depth=0", marks=pytest.mark.slow)],
)
def test_a_mistake_has_the_same_message_from_python_as_on_the_command_line(tmp_path, mistake):
    with pytest.raises(UserError) as caught:
        trainapp.plan([mistake])
    done = run_cli("mode=plan", mistake, cwd=tmp_path)
    assert done.returncode == 2
    assert "\n".join(line.strip() for line in done.stderr.splitlines()) == "trainapp: " + "\n".join(
        line.strip() for line in str(caught.value).splitlines()
    )


def test_the_command_lines_own_options_are_refused_from_python(tmp_path):
    for flag in ("--config-dir", "-m"):
        with pytest.raises(UserError, match=rf"^trainapp\.plan: {flag} is for the command line;.* config_dir=FOLDER"):
            trainapp.plan([flag, str(tmp_path), "model=gpt"])
    with pytest.raises(UserError, match=r"^config_dir=.*nowhere: there is no such folder"):
        trainapp.plan(["model=gpt"], config_dir=tmp_path / "nowhere")


@pytest.mark.slow
def test_a_planner_that_dies_is_no_estimate_and_says_how(tmp_path):
    (tmp_path / "dies.py").write_text(NET.replace("return", "__import__('os').abort()  #"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/dies.yaml").write_text("_target_: dies.Net\n")
    user = ("--config-dir=.", "model=dies", "user_packages=[dies]", "data=digits", "train.device=cpu")
    done = run_cli(*user, "mode=plan", "hydra.run.dir=here", cwd=tmp_path)
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert facts["method"] is None
    assert "signal 6" in facts["notes"][0]
    assert done.stdout.startswith("no estimate:\n")


def test_a_planner_that_is_late_is_ended():
    started, before = time.monotonic(), set(psutil.Process().children())
    with pytest.raises(process.NoAnswer, match="the planner's process took longer than 1 s"):
        process.call_in_subprocess("time.sleep", 60, patience=1.0)
    assert time.monotonic() - started < 30
    assert set(psutil.Process().children()) <= before


def test_the_planners_process_is_of_no_rank_and_may_see_no_device(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert process.call_in_subprocess("os.getenv", "RANK", sees_devices=False) is None
    assert process.call_in_subprocess("os.getenv", "CUDA_VISIBLE_DEVICES", sees_devices=False) == ""
    assert process.call_in_subprocess("os.getenv", "CUDA_VISIBLE_DEVICES") == "0"


def report_and_wait(answer):
    """Report, and return once the parent has received the report and answered with a file."""
    process.report({"number": 1})
    for _ in range(600):
        if os.path.exists(answer):
            return "answered"
        time.sleep(0.05)
    return "no answer"


def test_reports_arrive_while_the_function_runs(tmp_path):
    received = []

    def answer(part):
        received.append(part)
        (tmp_path / "answer").touch()

    function = f"{__name__}.report_and_wait"
    assert process.call_in_subprocess(function, str(tmp_path / "answer"), on_report=answer) == "answered"
    assert received == [{"number": 1}]
    process.report({"number": 2})  # outside of such a process: nothing
    assert received == [{"number": 1}]


@pytest.mark.slow
def test_an_error_while_a_report_is_shown_ends_the_planner(tmp_path):
    before = set(psutil.Process().children())

    def fail(part):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        process.call_in_subprocess(f"{__name__}.report_and_wait", str(tmp_path / "never"), on_report=fail)
    assert set(psutil.Process().children()) <= before


def test_a_plan_is_printed_once_though_it_comes_in_parts(tmp_path, monkeypatch, capsys, caplog):
    """First what the configuration needs, then a line per technique, then the rest."""
    config = compose.from_command_line([*GPT, "mode=plan"])
    plan = {
        **asdict(process.MemoryPlan("traced", 0.01)), "peak_bytes": 2048, "phase": "backward", "module": "",
        "ranks": {"world": 1}, "micro_size": 4, "largest_micro_size": 4, "limit_bytes": 4096,
    }  # fmt: skip
    printed_first = []

    def planned(config, picture, on_report):
        on_report({"plan": plan})
        printed_first.append(capsys.readouterr().out)
        on_report({"technique": {"overrides": "precision=bf16", "peak_bytes": 1024, "tried": 1, "most": 2}})
        on_report({"technique": {"overrides": "optimizer=sgd", "peak_bytes": None, "tried": 2, "most": 2}})
        on_report({"search": "precision=bf16"})
        best = {"overrides": "batch.micro_size=4", "peak_bytes": 2048, "missing_bytes": 0, "result": "same"}
        return plan | {"best": best}

    monkeypatch.setattr(printed, "plan_in_subprocess", planned)
    caplog.set_level("INFO")
    assert printed.print_plan(replace(config, run_dir=str(tmp_path))) == 2048
    assert printed_first[0].startswith("micro-batch 4: peak 2.0 KiB")
    assert printed_first[0].endswith("largest that fits 4.0 KiB: micro-batch 4\n")
    assert capsys.readouterr().out.endswith("\nthe least change that fits 4.0 KiB: peak 2.0 KiB:\nbatch.micro_size=4\n")
    assert [record.message for record in caplog.records] == [
        "peak 1.0 KiB with precision=bf16",
        "no plan with optimizer=sgd",
        "searching the largest micro-batch with precision=bf16",
    ]
