"""`trainapp new`: the commands that it prints work as they stand, in a clean directory."""

import os
import subprocess
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
    "experiment/sweep.yaml",
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


# As in the environment of scripts/train, which has no pytest.
WITHOUT_PYTEST = "import runpy, sys; sys.modules['pytest'] = None; sys.argv = sys.argv[1:]; "
WITHOUT_PYTEST += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


@pytest.mark.slow
def test_every_command_of_its_readme_works_and_leaves_nothing_to_commit(tmp_path):
    folder = tmp_path / "mine"
    project.write(folder)
    git = ("git", "-c", "user.name=Me", "-c", "user.email=me@mine")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True, timeout=60)
    block = (folder / "README.md").read_text().split("```")[1]
    commands = [line.partition("#")[0].split() for line in block.splitlines()[1:]]
    assert [words[:2] for words in commands] == [["python", "-m"]] * 5
    for words in [*commands, ["python", "-m", "pytest"]]:  # control: pytest is missing
        done = run_cli(*words[2:], cwd=folder, command=(sys.executable, "-c", WITHOUT_PYTEST))
        assert (done.returncode == 0) == (words[2] != "pytest"), done.stderr
        assert words[2] != "unittest" or "Ran 2 tests" in done.stderr
    results = [result(path.parent) for path in sorted(folder.glob("outputs/**/result.json"))]
    assert sum(own["oom_restarts"] for own in results) >= 1  # of the command with a limit
    assert [own["objective"] > 0.95 for own in results] == [True] * 4
    assert len(list(folder.glob("outputs/**/leaderboard.csv"))) == 1
    assert len(list(folder.glob("outputs/*/*/metrics.csv"))) == 2
    status = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert status.stdout == ""


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
