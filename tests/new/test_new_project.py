"""`trainapp new`: the commands that it prints work as they stand, in a clean directory."""

import os
import sys

import pytest
from helpers import files, result, run_cli

from trainapp.errors import UserError
from trainapp.new import project

CONSOLE_SCRIPT = (sys.executable, "-c", "import sys; from trainapp.__main__ import main; sys.exit(main())")
PROJECT = {
    "my_project.py",
    "model/net.yaml",
    "data/rings.yaml",
    "experiment/first.yaml",
    "README.md",
    "test_my_project.py",
    ".gitignore",
}


@pytest.mark.slow
def test_the_printed_commands_work_as_they_stand(tmp_path):
    done = run_cli("new", "my_project", cwd=tmp_path, command=CONSOLE_SCRIPT)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "my_project"
    assert files(folder) == PROJECT
    enter, train = (line.strip() for line in done.stdout.splitlines()[1:3])
    assert (enter, train) == ("cd my_project", "python -m trainapp --config-dir . experiment=first")
    ran = run_cli(*train.split()[3:], cwd=folder)
    assert ran.returncode == 0, ran.stderr
    (outputs,) = folder.glob("outputs/*/*/result.json")
    assert result(outputs.parent)["objective"] > 0.95  # three classes
    assert result(outputs.parent)["metric"] == "accuracy"
    again = run_cli("new", "my_project", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == (
        "trainapp: trainapp new my_project: exists and is not empty; choose another name, or remove it\n"
    )


@pytest.mark.slow
def test_its_own_tests_and_the_command_of_its_readme_that_meets_an_error(tmp_path):
    project.write(tmp_path / "mine")
    pytest_here = (sys.executable, "-m", "pytest")
    tests = run_cli("-p", "no:cacheprovider", "-q", cwd=tmp_path / "mine", command=pytest_here)
    assert tests.returncode == 0, tests.stdout
    assert "2 passed" in tests.stdout
    (line,) = (line for line in (tmp_path / "mine/README.md").read_text().splitlines() if "memory.limit" in line)
    words = line.partition("#")[0].split()[3:]
    done = run_cli(*words, "hydra.run.dir=less", cwd=tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "mine/less")["oom_restarts"] >= 1
    assert result(tmp_path / "mine/less")["objective"] > 0.95


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-project", "must be that of a Python module: letters, digits and _"),
        ("trainapp", "a module trainapp already exists"),
        ("file", "exists and is not empty"),
        ("file/below", "Not a directory"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        project.command([name])
    assert files(tmp_path) == {"file"}
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--force"]])
def test_one_name(arguments):
    with pytest.raises(UserError, match="give one name"):
        project.command(arguments)


def test_another_place_and_an_empty_folder(tmp_path):
    (tmp_path / "deep/other").mkdir(parents=True)
    project.command([str(tmp_path / "deep/other")])
    assert files(tmp_path / "deep/other") == {name.replace("my_project", "other") for name in PROJECT}
    texts = [(tmp_path / "deep/other" / name).read_text() for name in files(tmp_path / "deep/other")]
    assert not any("my_project" in text or "$name" in text for text in texts)
    assert any("user_packages: [other]" in text for text in texts)
