"""The structure that docs/architecture.md promises."""

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import runs
from helpers import ROOT, environment

from trainapp.training import loop

SOURCES = sorted((ROOT / "src" / "trainapp").rglob("*.py"))
LOOP = ROOT / "src" / "trainapp" / "training" / "loop.py"


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def types_of(function: ast.FunctionDef) -> set[str]:
    """The classes named in the parameters' annotations."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    texts = [ast.unparse(a.annotation) for a in arguments if a.annotation is not None]
    return {name for text in texts for name in re.findall(r"\w+", text)}


def takes_config_and_run(path: Path) -> list[str]:
    return [f"{path.name}:{f.lineno} {f.name}" for f in functions(path) if {"Config", "Session"} <= types_of(f)]


def test_no_function_takes_both_a_config_and_a_run():
    found = [line for path in SOURCES for line in takes_config_and_run(path)]
    assert not found


def test_a_function_that_takes_both_is_found(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def f(config: Config, *, session: Session | None = None): ...\ndef g(config: Config): ...\n")
    assert [line.split()[-1] for line in takes_config_and_run(path)] == ["f"]


@pytest.mark.parametrize(("name", "most"), [("train", 20), ("train_step", 24)])
def test_the_loop_reads_on_one_screen(name, most):
    (function,) = [f for f in functions(LOOP) if f.name == name]
    assert function.end_lineno - function.lineno + 1 <= most
    assert len(LOOP.read_text().splitlines()) <= 160


def test_functions_stay_short():
    long = [(p.name, f.name) for p in SOURCES for f in functions(p) if f.end_lineno - f.lineno >= 60]
    assert not long


def test_rooms_stay_small():
    in_room = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert max(in_room.values()) <= 14, in_room.most_common(1)


def test_the_architecture_page_names_every_room_and_only_real_files():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {p.name for p in (ROOT / "src" / "trainapp").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert not {room for room in rooms if f"`{room}/`" not in page}
    for name in re.findall(r"`([a-z_/]+\.(?:py|yaml))`", page):
        places = (ROOT, ROOT / "src" / "trainapp")
        assert any((place / name).exists() for place in places), name


def entered_by_a_settled_step(run_dir: Path) -> set[str]:
    """Files under src/trainapp, from one `train_step` to the next."""
    source, entered = ROOT / "src" / "trainapp", set()
    quiet = ("every.log=null", "every.save=null", "data.num_workers=0", "train.max_steps=99")
    session = runs.prepare(run_dir, *runs.MODELS["mlp"], *quiet)
    is_last = iter([*[False] * 12, True, False])
    steps = loop.train_step

    def profiled(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(source):
            entered.add(str(path.relative_to(source)))

    def step(session):
        if next(is_last):  # the thirteenth: until the next one begins
            sys.setprofile(profiled)
        elif sys.getprofile() is not None:
            raise StopIteration
        steps(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        try:
            loop.train(session)
        except StopIteration:
            pass
        finally:
            sys.setprofile(None)
            session.close()
    # Entered where the CPU lacks instructions for 16 bits and an earlier test of this process has computed in them.
    return entered - {"optim/emulated_kernels.py"}


def test_the_architecture_page_lists_the_files_of_a_settled_step(tmp_path):
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("### The files that a step enters")[1].split("## Where to add")[0]
    entered = entered_by_a_settled_step(tmp_path)
    assert entered == set(re.findall(r"`([a-z_/]+\.py)`", table))
    assert len(entered) <= 28


# The import contracts in pyproject.toml, which scripts/test checks the code for: an import that should not be, and how
# it is reported.
ROOMS = {
    "data/batch.py": ("from trainapp.training import loop", "trainapp.data.batch -> trainapp.training.loop"),
    "errors.py": ("from trainapp import units", "trainapp.errors -> trainapp.units"),
    "new_room.py": ("", "trainapp.new_room"),
}
TORCH = {
    "config/excludes.py": ("import torch", "trainapp.config.excludes -> torch"),
    "__main__.py": ("from trainapp.launch import elastic", "trainapp.__main__ -> trainapp.launch.elastic"),
}


@pytest.mark.parametrize(
    ("contract", "imports"),
    [
        ("A room imports only the rooms below it", ROOMS),
        ("--help, --cfg and mistakes in settings do not wait for torch", TORCH),
    ],
)
def test_imports_that_should_not_be_are_caught(tmp_path, contract, imports):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for module, (line, _) in imports.items():
        with (tmp_path / "src/trainapp" / module).open("a") as file:
            file.write(f"\n{line}\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "500"}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    broken = [line.partition(" BROKEN")[0] for line in done.stdout.splitlines() if " BROKEN" in line]
    assert broken == [contract], done.stdout + done.stderr
    for _, reported in imports.values():
        assert reported in done.stdout, done.stdout
