"""What a process's environment holds before torch is imported."""

import os
import subprocess
import sys

import pytest
import runs
from helpers import environment

from trainapp.launch import process
from trainapp.launch.process import ALLOCATOR_SETTINGS, prepare_process, uses_expandable_segments

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
NAMES = (*ALLOCATOR_SETTINGS, CUBLAS)


@pytest.fixture
def prepared(monkeypatch):
    """`prepared(names, ...)`: what `prepare_process` makes of an environment with these names."""

    def prepare(names=None, *, expandable_segments=True, deterministic=False):
        for name in NAMES:  # registers them for restoring, too
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in (names or {}).items():
            monkeypatch.setenv(name, value)
        prepare_process(expandable_segments, deterministic)
        return {name: os.environ[name] for name in NAMES if name in os.environ}

    return prepare


def test_expandable_segments(prepared):
    assert prepared() == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert prepared(expandable_segments=False) == {}


@pytest.mark.parametrize("name", ALLOCATOR_SETTINGS)
def test_what_the_user_has_set_wins_under_any_name(prepared, name):
    """PYTORCH_CUDA_ALLOC_CONF beside PYTORCH_ALLOC_CONF would hide it: torch reads one of them."""
    chosen = {name: "backend:cudaMallocAsync"}
    assert prepared(chosen) == chosen


@pytest.mark.parametrize(
    ("kernel", "overrides", "expected"),
    [
        ("6.8.0-45-generic\n", (), True),
        ("5.15.153.1-microsoft-standard-WSL2\n", (), False),
        ("5.15.153.1-microsoft-standard-WSL2\n", ("memory.expandable_segments=true",), True),
        ("6.8.0-45-generic\n", ("memory.expandable_segments=false",), False),
        (None, (), True),
    ],
)
def test_the_first_allocation_may_fail_under_wsl(tmp_path, monkeypatch, kernel, overrides, expected):
    """No file: the system is not Linux."""
    monkeypatch.setattr(process, "OSRELEASE", tmp_path / "osrelease")
    if kernel is not None:
        process.OSRELEASE.write_text(kernel)
    assert uses_expandable_segments(runs.configure(tmp_path, *runs.MODELS["mlp"], *overrides)) is expected


def test_cublas_is_deterministic_where_a_job_may_ask_for_it(prepared):
    assert CUBLAS not in prepared()
    assert prepared(deterministic=True)[CUBLAS] == ":4096:8"
    assert prepared({CUBLAS: ":16:8"}, deterministic=True)[CUBLAS] == ":16:8"


COMMAND = """
import sys

from trainapp import __main__
from trainapp.launch import launch

prepare = launch.prepare_process

def noting(*arguments):
    print("prepared:", arguments, "torch" in sys.modules)
    prepare(*arguments)

launch.prepare_process = noting
__main__.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "may_be_deterministic"),
    [
        ((), False),
        (("train.deterministic=true",), True),
        (("-m", "hydra/sweeper=basic", "train.seed=0,1", "hydra.sweep.dir=sweep"), True),
    ],
)
def test_the_command_line_prepares_before_torch_is_imported(tmp_path, words, may_be_deterministic):
    """torch 2.13 reads the allocator's settings while it is imported, later jobs in its process too late."""
    tiny = (*runs.STEPS_ONLY, *runs.MODELS["mlp"], "train.max_steps=1")
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words, *tiny],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("prepared:")]
    first, later = (f"prepared: (True, {may_be_deterministic}) {imported}" for imported in (False, True))
    assert lines == ([first, later] if "-m" in words else [first])
