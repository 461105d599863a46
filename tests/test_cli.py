"""The command line as a user meets it: help without torch, and every mistake as one message without a traceback."""

import re
import sys

import pytest
import runs
import torch
from helpers import OWN_FILES, ROOT, files, run_cli

import trainapp
from trainapp.errors import UserError

RUN_DIR = re.compile(r"outputs/[\d-]+/[\d-]+-[0-9a-f]{6}/")


def assert_refused(done, cwd, *parts, written=frozenset()):
    """One message on stderr with all `parts`, exit code 2, and no files except Hydra's own and those in `written`."""
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert first.startswith("trainapp: "), done.stderr
    assert all(line.startswith(" " * 10) for line in rest), done.stderr
    for part in parts:
        assert part in done.stderr
    assert done.stdout == ""
    assert {RUN_DIR.sub("", name) for name in files(cwd)} <= OWN_FILES | written


# Help


def imported(done):
    """The modules imported by a process that ran under `-X importtime`."""
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.slow
def test_help_and_cfg_and_wrong_values_never_import_torch(tmp_path):
    traced = (sys.executable, "-X", "importtime", "-m", "trainapp")
    for arguments in (["--help"], ["--cfg", "job"], ["--cfg", "job", "model=gpt"], ["optimizer.lr=-1"]):
        modules = imported(run_cli(*arguments, cwd=tmp_path, command=traced))
        assert "trainapp.config.schema" in modules
        assert not {name for name in modules if name.partition(".")[0] == "torch"}, arguments
    # Control: anything that needs the model's class imports torch, and the probe detects it.
    assert "torch" in imported(run_cli("model.depth=19", cwd=tmp_path, command=traced))


@pytest.mark.slow
def test_help_names_every_option_of_every_group(tmp_path):
    done = run_cli("--help", cwd=tmp_path)
    shown = dict(re.findall(r"^(\w+): (.*)$", done.stdout, re.MULTILINE))
    groups = {f.name: f for f in (ROOT / "conf").iterdir() if f.is_dir() and f.name != "hydra"}
    for name, folder in groups.items():
        assert shown[name] == ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    assert done.returncode == 0
    assert files(tmp_path) == set()


def test_the_version_is_that_of_trainapp(tmp_path):
    assert run_cli("--version", cwd=tmp_path).stdout == f"trainapp {trainapp.__version__}\n"


# Mistakes that end before torch is imported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("batch.micro_sze=3", ["batch.micro_sze: no such setting", "'micro_size'"]),
        ("precision=bf17", ["precision=bf17: no such option", "'bf16'", "available: bf16, bf16_pure, fp16, fp32, fp8"]),
        ("train=null", ["train=null: must be"]),
        ("hydra.run.dir=/dev/null/run", ["/dev/null/run: Not a directory", "hydra.run.dir"]),
        ("--config-dir=nowhere", ["nowhere", "not found"]),
    ],
)
def test_mistake_is_one_message(tmp_path, arguments, parts):
    assert_refused(run_cli(*arguments.split(), cwd=tmp_path), tmp_path, *parts)


# Mistakes that need the classes or the files to be detected


@pytest.mark.slow
def test_wrong_arguments_of_model_and_data_are_reported_together(tmp_path):
    done = run_cli("model.depth=19", "data.augment=maybe", "+optimizer.btas=1", cwd=tmp_path)
    assert_refused(done, tmp_path, "model.depth=19: must be 18, 34, 50, 101 or 152", "data.augment=maybe")


def test_device_that_is_not_there(tmp_path):
    for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not there:
            with pytest.raises(UserError, match=rf"train\.device={name}: this machine has no such device; available"):
                runs.run(tmp_path / "run", f"train.device={name}")


@pytest.mark.slow
def test_resume_from_what_is_no_checkpoint(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("no checkpoint")
    done = run_cli("checkpointing.resume=folder", "model=mlp", cwd=tmp_path)
    message = "checkpointing.resume=folder: neither a checkpoint nor a run directory with a good one"
    assert_refused(done, tmp_path, message, written={"a.txt"})
    for name, rule in (("nowhere", "no such file or directory"), ("a.txt", "neither a checkpoint")):
        with pytest.raises(UserError, match=f"checkpointing.resume=.*{name}: {rule}"):
            runs.run(tmp_path / "run", "model=mlp", f"checkpointing.resume={tmp_path / name}")


@pytest.mark.slow
def test_memory_limit_that_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"memory\.limit: the .* tried to allocate .* of 1\.0 MiB in use"):
        runs.run(tmp_path / "run", "memory.limit=1MiB")


# Faults that are not typing mistakes


@pytest.mark.slow
def test_fault_in_a_users_model_keeps_its_trace(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Broken(nn.Module):\n"
        "    def __init__(self, **settings):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Linear(1, 1)\n"
        "    def forward(self, images):\n"
        "        return images + 'a string'  # the faulty line\n"
    )
    done = run_cli("model=mlp", "model._target_=mine.Broken", "user_packages=[mine]", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "return images + 'a string'  # the faulty line" in done.stderr
    assert any(line.startswith("TypeError: ") for line in done.stderr.splitlines()[-2:])  # and a note of the step
    assert "trainapp: " not in done.stderr


@pytest.mark.slow
def test_a_short_run_imports_no_matplotlib(tmp_path):
    """Half a second. Control: a run that draws does."""
    traced = (sys.executable, "-X", "importtime", "-m", "trainapp")
    run = ("model=mlp", "train.max_steps=2", "train.device=cpu")
    plain, draws = (
        imported(run_cli(*run, *more, cwd=tmp_path, command=traced)) for more in ((), ["callbacks=confusion_matrix"])
    )
    assert "torch" in plain
    assert [{"matplotlib"} & modules for modules in (plain, draws)] == [set(), {"matplotlib"}]


@pytest.mark.slow
def test_fault_while_a_users_module_is_imported_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("import not_there_at_all\n")
    own = ("model=mlp", "model._target_=mine.Net", "user_packages=[mine]")
    done = run_cli(*own, cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert_refused(
        done,
        tmp_path,
        "importing mine failed: No module named 'not_there_at_all'",
        written={"mine.py"},
    )


def test_full_trace_of_a_mistake_on_request(tmp_path):
    done = run_cli("optimizer.lr=-1", cwd=tmp_path, env={"HYDRA_FULL_ERROR": "1"})
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "optimizer.lr=-1: must be greater than 0" in done.stderr
