"""Code blocks of the documents, which tests run as a reader would."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from forked_cli import PROGRAM, environment
from helpers import run_cli


def blocks(document: Path, language: str) -> list[str]:
    """The contents of the blocks marked as `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def write_files(document: Path, folder: Path) -> set[str]:
    """Write the blocks that are preceded by a line with their path. Returns the paths."""
    named = re.findall(r"^`(\S+)`\n```(?:python|yaml)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    for path, block in named:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(block)
    return {path for path, _ in named}


def commands(document: Path) -> list[list[str]]:
    """The commands of the bash blocks, split into words, without comments."""
    lines = "".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def with_this_python(words: list[str]) -> list[str]:
    """The same command in the test environment: no set-up, no activation."""
    beside = Path(sys.executable).parent
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    if words[0] in ("scripts/train", "trainapp"):
        return [sys.executable, "-m", "trainapp", *words[1:]]
    if words[0] == "tensorboard":
        return [str(beside / "tensorboard"), *words[1:]]
    raise AssertionError(f"no test knows how to run: {words}")


def run_command(words: list[str], folder: Path, timeout: float) -> subprocess.CompletedProcess:
    """Run a command of a document in a folder: in a fork, if it is the program's. Those of the README are started as a
    reader starts them.
    """
    variables = {"TRAINAPP_CACHE": str(folder / "cache")}
    command = with_this_python(words)
    if command[:3] == list(PROGRAM):
        return run_cli(*command[3:], cwd=folder, env=variables, timeout=timeout)
    return subprocess.run(
        command, cwd=folder, env=environment(variables), capture_output=True, text=True, timeout=timeout
    )
