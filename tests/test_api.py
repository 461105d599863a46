"""`trainapp.train`, `trainapp.load` and `trainapp.plan` in programs of a user's."""

import json
import os
import signal
import subprocess
import sys

import pytest
import runs
import torch
from helpers import ROOT, environment, files, lines_in, metrics, run_cli, wait_until
from helpers import result as result_file
from markdown import blocks

import trainapp
from trainapp import api
from trainapp.checkpoint.manifest import read_manifest, write_manifest
from trainapp.data.sets.digits import Digits
from trainapp.run import result

TINY = (*runs.MODELS["mlp"], "train.device=cpu", "batch.global_size=16", "train.max_epochs=null", "memory.guard=false")


def python(cwd, program, timeout=120):
    (cwd / "program.py").write_text(program)
    return run_cli(cwd=cwd, command=(sys.executable, "program.py"), timeout=timeout)


# What is around the run

PROGRAM = """
import json, logging, os, pickle, random, signal, sys

import trainapp

imported = {name.partition(".")[0] for name in sys.modules}
assert not imported & {"torch", "hydra", "pydantic", "numpy"}, imported

import hydra
import numpy as np
import torch
from hydra.core.global_hydra import GlobalHydra

SETTINGS = ["model=mlp", "model.width=16", "train.max_steps=3", "train.device=cpu"]


def state():
    seen = {
        "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path, "environment": dict(os.environ),
        "signals": [str(signal.getsignal(n)) for n in (2, 10, 12, 15)],
        "hydra": [id(GlobalHydra.instance()), id(GlobalHydra.instance().hydra)],
        "log": [[str(logging.getLogger(n).handlers), logging.getLogger(n).level] for n in (None, "trainapp")],
        "random": [random.getstate(), torch.get_rng_state().tolist(), pickle.dumps(np.random.get_state())],
    }
    return {name: repr(value) for name, value in seen.items()}


@hydra.main(version_base="1.3", config_path=None)
def program(own):
    random.seed(5)
    before = state()
    results = [trainapp.train(SETTINGS, run_dir=f"runs/{name}") for name in "ab"]
    models = [trainapp.load(own.run_dir, which="last") for own in results]
    try:
        trainapp.train(["model=nothing"], run_dir="runs/c")
    except trainapp.UserError as error:
        message = str(error)
    equal = all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models)))
    after = state()
    print(json.dumps({"changed": [name for name in before if after[name] != before[name]], "equal": equal,
                      "objectives": [own.objective for own in results], "message": message}))


program()
"""


@pytest.mark.slow
def test_nothing_is_left_but_the_run_directory(tmp_path):
    """In a program that uses Hydra: twice; then a mistake."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_cli("hydra.run.dir=own", cwd=tmp_path, command=(sys.executable, "program.py"))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["changed"] == []
    assert facts["equal"]
    assert facts["objectives"][0] == facts["objectives"][1]
    assert facts["message"].startswith("model=nothing: no such option")
    assert {name.partition("/")[0] for name in files(tmp_path)} == {"program.py", "own", "runs"}
    assert sorted(os.listdir(tmp_path / "runs")) == ["a", "b"]
    assert {"trainapp.log", "result.json", "metrics.jsonl"} <= files(tmp_path / "runs/a")


@pytest.mark.slow
def test_the_page(tmp_path):
    """Its examples, one after the other, as one program."""
    program = "".join(blocks(ROOT / "docs/python.md", "python"))
    assert program.count("trainapp.") >= 5
    done = python(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert f"\n20 {result_file(tmp_path / 'runs/a')['objective']}" in done.stdout
    assert "model=mpl: no such option; did you mean 'mlp'?" in done.stdout
    assert sorted(os.listdir(tmp_path / "runs")) == ["a", "predictions"]
    assert {"predictions.jsonl", "trainapp.log"} <= files(tmp_path / "runs/predictions")
    lines = (tmp_path / "runs/predictions/predictions.jsonl").read_text().splitlines()
    assert len(lines) == 360
    assert lines[0] in done.stdout


# One call


@pytest.mark.slow
def test_the_result_is_that_of_the_command_line_and_of_the_finished_run(tmp_path):
    overrides = [*TINY, "train.max_steps=4"]
    run = trainapp.train(overrides, run_dir=tmp_path / "a")
    assert run.run_dir == tmp_path / "a"
    assert isinstance(run, trainapp.Result)
    read = result.read(tmp_path / "a")
    assert run == read
    assert read.micro_schedule == {1: 16}
    assert trainapp.train(overrides, run_dir=tmp_path / "a") == run  # with the time and the evaluation of then
    done = run_cli(*overrides, f"hydra.run.dir={tmp_path / 'b'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    timed = ("samples_per_second", "seconds", "checkpoint")
    by_command = {name: value for name, value in result_file(tmp_path / "b").items() if name not in timed}
    assert {name: value for name, value in result_file(tmp_path / "a").items() if name not in timed} == by_command
    with pytest.raises(trainapp.UserError, match=r"optimizer.lr: 0.01 now|optimizer.lr: .* before, 0.01 now"):
        trainapp.train([*overrides, "optimizer.lr=0.01"], run_dir=tmp_path / "a")


@pytest.mark.parametrize(
    ("overrides", "run_dir", "message"),
    [
        (["-m", "model=mlp"], "a", "trainapp.train: -m is for the command line; give overrides"),
        (["hydra.run.dir=b"], "a", "trainapp.train: hydra.run.dir=b is for the command line.*run_dir=DIR"),
        (["mode=eval", "checkpointing.resume=x"], "a", "trainapp.train: mode=eval does not train"),
        (["mode=plan"], "a", "trainapp.train: mode=plan does not train; use trainapp.plan"),
        ("model=mlp", "a", "must be a list of strings"),
        (["model=mlp"], "file", "file: File exists; .*must name a folder"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, overrides, run_dir, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(trainapp.UserError, match=message):
        trainapp.train(overrides, run_dir=run_dir)
    assert files(tmp_path) == {"file"}


def test_one_run_at_a_time(tmp_path):
    with api._one_run("trainapp.train"), pytest.raises(trainapp.UserError, match="another run is in progress in this"):
        trainapp.train([*TINY, "train.max_steps=1"], run_dir=tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        with pytest.raises(trainapp.UserError, match="started several processes; start"):
            trainapp.train([*TINY, "train.max_steps=1"], run_dir=tmp_path / "a")
    assert trainapp.train([*TINY, "train.max_steps=1"], run_dir=tmp_path / "a").steps == 1


INTERRUPTED = """
import trainapp

overrides = ["model=mlp", "train.device=cpu", "train.max_epochs=null", "schedule=constant", "every.log=1"{more}]
try:
    trainapp.train([*overrides, "train.max_steps=100000"], run_dir="runs/a")
except KeyboardInterrupt:
    print("interrupted", flush=True)
steps = max(int(path.name[5:]) for path in __import__("pathlib").Path("runs/a/checkpoints").glob("step_*"))
print(steps, trainapp.train([*overrides, f"train.max_steps={{steps + 2}}"], run_dir="runs/a").steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ', "parallel=ddp", "parallel.devices=2"'])
def test_ctrl_c_saves_and_is_raised(tmp_path, more):
    """Also where the run is below another process: the terminal's Ctrl-C reaches the caller."""
    (tmp_path / "program.py").write_text(INTERRUPTED.format(more=more))
    process = subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: lines_in(tmp_path / "runs/a/metrics.jsonl") >= 3, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    said = out.splitlines()
    assert "interrupted" in said
    steps, then = map(int, said[-1].split())
    assert then == steps + 2
    assert [line["step"] for line in metrics(tmp_path / "runs/a")][-3:] == [steps, steps + 1, steps + 2]


@pytest.mark.slow
def test_several_workers_from_a_program_without_a_main_guard(tmp_path):
    program = f"""
import os, signal, trainapp
before = dict(os.environ), signal.getsignal(2), signal.getsignal(15)
overrides = {[*TINY, "train.max_steps=4"]!r}
two = trainapp.train([*overrides, "parallel=ddp", "parallel.devices=2"], run_dir="runs/two")
one = trainapp.train(overrides, run_dir="runs/one")
assert before == (dict(os.environ), signal.getsignal(2), signal.getsignal(15))
print(two.steps, two.samples, two.micro_size, abs(two.evaluation["loss"] - one.evaluation["loss"]) < 1e-5)
try:
    trainapp.train([*overrides, "optimizer.lr=0.5", "parallel=ddp", "parallel.devices=2"], run_dir="runs/two")
except trainapp.UserError as error:
    print(error)
"""
    done = python(tmp_path, program)
    assert done.returncode == 0, done.stderr
    sizes, refused, *differences = done.stdout.splitlines()[-4:]
    assert sizes == "4 64 8 True"
    assert refused.startswith("hydra.run.dir=")
    assert "belongs to a run whose settings give another result" in refused
    assert differences[0].startswith("optimizer.lr: ")
    assert sorted(os.listdir(tmp_path)) == ["program.py", "runs"]


# The model of a run


def test_best_last_and_path(tmp_path):
    """The best of the objective is an earlier one: the rate of later steps destroys the model."""
    bad = ("objective=max loss", "every.save=2", "every.eval=2", "train.max_steps=6", "checkpointing.keep_last=3")
    run = trainapp.train([*TINY, *bad], run_dir=tmp_path)
    assert run.best_step == 2
    first = runs.checkpoint(tmp_path, 2)
    best, last, named = (trainapp.load(tmp_path, which) for which in ("best", "last", first))
    assert runs.differences(best.state_dict(), named.state_dict()) == []
    assert runs.differences(best.state_dict(), last.state_dict()) != []


def test_all_of_a_model_is_loaded(tmp_path):
    """Lazy shapes, a buffer outside of the state dict, extra state; a frozen part has no average, and stays frozen."""
    own = (
        "model._target_=own_exports.Counting",
        "user_packages=[own_exports]",
        "data=digits",
        "model.freeze=['head.*']",
    )
    runs.run_until(tmp_path, 4, *own, "train.ema=0.9", "train.max_steps=9", "train.check_loss=false")
    before = torch.get_rng_state()
    loaded, saved = trainapp.load(tmp_path, "last", ["own_exports"]), runs.saved(tmp_path, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(loaded.inside.weight, saved["average"]["inside.weight"])
    assert torch.equal(loaded.head.weight, saved["model"]["head.weight"])
    assert (loaded.seen, loaded.calls, loaded.head.weight.requires_grad) == (4, 4, False)


def test_a_run_without_a_best_and_other_mistakes(tmp_path):
    runs.run_until(tmp_path / "run", 1, *runs.MODELS["mlp"])
    with pytest.raises(trainapp.UserError, match=r"best: no such file.* saved none at an evaluation.*which='last'"):
        trainapp.load(tmp_path / "run")
    with pytest.raises(trainapp.UserError, match=r"which=.*nothing/checkpoints/best: no such file or directory"):
        trainapp.load(tmp_path / "nothing")
    with pytest.raises(trainapp.UserError, match=r"which=.*step_00000007: .*no such file"):
        trainapp.load(tmp_path / "run", which=tmp_path / "run/checkpoints/step_00000007")


def test_packages_that_the_checkpoint_names_are_not_imported(tmp_path, monkeypatch):
    """A manifest that vouches for itself, with a model of the attacker's and the permission to build it."""
    own = ("model._target_=own_models.Scratch", "user_packages=[own_models]", "data=digits")
    runs.run_until(tmp_path / "run", 1, *own)
    assert type(trainapp.load(tmp_path / "run", "last", ["own_models"])).__name__ == "Scratch"
    with pytest.raises(trainapp.UserError, match=r"own_models.Scratch: not among .*user_packages=\[own_models\]"):
        trainapp.load(tmp_path / "run", "last")
    path = runs.checkpoint(tmp_path / "run", 1)
    manifest, marker = read_manifest(path), tmp_path / "payload-ran"
    manifest["config"]["user_packages"] = ["planted"]
    manifest["config"]["model"] |= {"target": "planted.Model", "arguments": {}}
    write_manifest(path, manifest)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: pass\n")
    with pytest.raises(trainapp.UserError, match=r"planted.Model: not among the packages"):
        trainapp.load(tmp_path / "run", "last", ["own_models"])
    assert not marker.exists()
    with pytest.raises(Exception, match=r".*"):
        trainapp.load(tmp_path / "run", "last", ["planted"])
    assert marker.exists()  # the caller's word counts


def test_predictions_are_those_of_the_loaded_model(tmp_path):
    """Also from a directory whose name Hydra would read as something else."""
    name = "a, 'b' = {c} \\'é ${oc.env:HOME}"
    run = trainapp.train([*TINY, "train.max_steps=4"], run_dir=tmp_path / name)
    file = trainapp.predict(run.run_dir, run_dir=tmp_path / "predictions")
    assert file == tmp_path / "predictions/predictions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    data, model = Digits("val"), trainapp.load(run.run_dir, "last")
    with torch.no_grad():
        logits = model(data.__getitems__(range(len(data)))["inputs"])
    assert [row["prediction"] for row in rows] == logits.argmax(-1).tolist()
    assert len(set(logits.argmax(-1).tolist())) > 1
    assert result.read(run.run_dir) == run  # as it was


@pytest.mark.nightly
def test_types(tmp_path):
    """A user's program passes mypy; a wrong one does not."""
    (tmp_path / "user.py").write_text(
        "import trainapp\n"
        "run = trainapp.train(['model=mlp'], run_dir='a')\n"
        "steps: int = run.steps\n"
        "model = trainapp.load(run.run_dir, which='best').eval()\n"
        "peak: int = trainapp.plan(['model=mlp'])['peak_bytes']\n"
        "lines = trainapp.predict('a', run_dir='b').read_text().splitlines()\n"
        "run.stepps  # type: ignore[attr-defined]\n"
        "trainapp.train('model=mlp')  # type: ignore[call-arg]\n"
        "trainapp.load(3)  # type: ignore[arg-type]\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    env = environment({"MYPYPATH": str(ROOT / "src")})
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=290)
    assert [line for line in done.stdout.splitlines() if line.startswith("user.py")] == []
    assert "src/trainapp" not in done.stdout or done.returncode == 1


def test_a_callers_no_grad_does_not_reach_the_run():
    with torch.inference_mode(), api._as_before():
        assert torch.is_grad_enabled()
        assert not torch.zeros(2).is_inference()
