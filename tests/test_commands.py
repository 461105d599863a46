"""The commands beside training: how each is used."""

import pytest
from helpers import files, run_cli

from trainapp.commands import COMMANDS


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_has_help(tmp_path, name):
    for flag in ("--help", "-h"):
        done = run_cli(name, flag, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"trainapp {name} ")
    assert not files(tmp_path)
