"""Composing where Hydra is in use already: in a run from the command line, or in the user's own program."""

import json
import sys

import pytest
from helpers import run_cli

PROGRAM = """
import json

import hydra
import trainapp
from hydra import version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from trainapp.config import compose
from trainapp.errors import UserError


def state():
    runtime = JobRuntime.instance().get("name"), HydraConfig.get().runtime.output_dir
    return [id(GlobalHydra.instance()), id(GlobalHydra.instance().hydra), str(version.getbase()), *runtime]


@hydra.main(version_base="1.2", config_path=None)
def program(own):
    before = state()
    size = {"batch.micro_size": 4, "plan.techniques": "false", "train.device": "cpu"}
    facts = trainapp.plan(["model=mlp", "data=digits", *(f"{name}={value}" for name, value in size.items())])
    try:
        compose.from_command_line(["model=nothing"])
    except UserError as error:
        print(json.dumps({"micro_size": facts["micro_size"], "error": str(error), "kept": state() == before}))


program()
"""


@pytest.mark.slow
def test_a_plan_inside_the_users_own_hydra_program(tmp_path):
    """And Hydra is left as it was, after a mistake as well."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_cli(cwd=tmp_path, command=(sys.executable, "program.py"))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["micro_size"] == 4
    assert facts["error"].startswith("model=nothing: no such option")
    assert facts["kept"]
