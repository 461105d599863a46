"""The wheel runs without its checkout, constraints.txt pins everything, scripts/ and CI set up what they say."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import trainapp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUPPORTED = ["3.10", "3.11", "3.12", "3.13", "3.14"]
CLEAN_ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")}


def run(*command, cwd, **env):
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=CLEAN_ENV | env,
        capture_output=True,
        text=True,
        timeout=200,
    )


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source archive, which is built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a new environment that has the wheel and can see this environment's other packages."""
    home = tmp_path_factory.mktemp("installed") / "env"
    venv.create(home, with_pip=True)
    pip = run(home / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=home)
    assert pip.returncode == 0, pip.stderr
    (site,) = home.glob("lib/python*/site-packages")
    # A path added this way is searched last and its .pth files are not read: an editable install stays invisible.
    (site / "outer.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) + "\n")
    return home / "bin"


def files_under(folder, skip=()):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix not in skip}


def test_wheel_holds_the_package_its_configuration_and_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {n.removeprefix("trainapp/") for n in names if n.startswith("trainapp/")}
    configuration = {f"conf/{name}" for name in files_under(ROOT / "conf")}
    sources = files_under(ROOT / "src/trainapp", skip=(".pyc",))
    assert package == configuration | sources
    assert {"conf/train.yaml", "conf/data/digits.yaml", "__main__.py", "py.typed"} <= package
    assert any(re.fullmatch(r"data/.*digits.*", name) and not name.endswith(".py") for name in package)
    assert {n.split("/")[0] for n in names} == {
        "trainapp",
        "hydra_plugins",
        f"trainapp-{trainapp.__version__}.dist-info",
    }


def test_the_source_archive_holds_what_git_holds(wheel):
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a checkout of git")
    assert names - set(tracked.stdout.splitlines()) <= {"PKG-INFO"}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/test_packaging.py", "conf/train.yaml"} <= names


@pytest.mark.slow
def test_installed_wheel_composes_the_same_configuration_from_any_directory(installed, tmp_path):
    where = run(installed / "python", "-c", "import trainapp; print(trainapp.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)

    command = ["--cfg", "job", "model=mlp", "train.seed=7"]
    module = run(installed / "python", "-m", "trainapp", *command, cwd=tmp_path)
    script = run(installed / "trainapp", *command, cwd=tmp_path)
    checkout = run(sys.executable, "-m", "trainapp", *command, cwd=tmp_path)
    assert module.returncode == script.returncode == 0, module.stderr + script.stderr
    assert module.stdout == script.stdout == checkout.stdout
    assert "seed: 7" in module.stdout
    assert "trainapp.models.mlp." in module.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_installed_wheel_writes_a_project_that_trains(installed, tmp_path):
    done = run(installed / "trainapp", "new", "my_project", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    project, train = tmp_path / "my_project", ("--config-dir", ".", "experiment=first", "train.max_epochs=2")
    ran = run(installed / "python", "-m", "trainapp", *train, "hydra.run.dir=run", cwd=project)
    assert ran.returncode == 0, ran.stderr
    assert (project / "run/result.json").exists()


# The pins


def of_python(python):
    return {"python_version": python, "python_full_version": f"{python}.0"}


def pins(text, python):
    """{name: version specifiers of the lines that apply to this Python version}."""
    found = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(of_python(python)):
                found.setdefault(canonicalize_name(pin.name), []).append(pin.specifier)
    return found


def direct_requirements():
    project = PROJECT["project"]
    lists = [
        project["dependencies"],
        project["optional-dependencies"]["test"],
        PROJECT["build-system"]["requires"],
    ]
    return [Requirement(text) for texts in lists for text in texts]


def of_installed_extras():
    """What extras require, where it is installed: all of it by scripts/test --all."""
    texts = [text for texts in PROJECT["project"]["optional-dependencies"].values() for text in texts]
    return [requirement for requirement in map(Requirement, texts) if is_installed(requirement.name)]


def is_installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def unpinned(pinned):
    """Names of the project's installed dependencies, direct and indirect, that have no pin in `pinned`.

    A package that another one requires at an exact version, as torch does its CUDA packages, counts as pinned.
    """
    todo, seen, exact = [(r, "") for r in (*direct_requirements(), *of_installed_extras())], set(), set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if str(requirement.specifier).startswith("=="):
            exact.add(name)
        for extra in requirement.extras | {""}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(Requirement(text), extra) for text in metadata.requires(name) or []]
    return {name for name, _ in seen} - exact - set(pinned)


CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def test_every_installed_dependency_is_pinned():
    pinned = pins(CONSTRAINTS, f"3.{sys.version_info.minor}")
    assert unpinned(pinned) == set()
    # Controls: the check detects a direct, an indirect and a test dependency whose pin is removed.
    for name in ("psutil", "markupsafe", "pluggy"):
        assert unpinned({k: v for k, v in pinned.items() if k != name}) == {name}


@pytest.mark.parametrize("python", SUPPORTED)
def test_each_python_has_one_exact_pin_for_each_package(python):
    pinned = pins(CONSTRAINTS, python)
    for name, specifiers in pinned.items():
        assert len(specifiers) == 1, name
        assert re.fullmatch(r"==[0-9.]+((b|rc)\d+)?", str(specifiers[0])), name  # some release nothing else
    extras = PROJECT["project"]["optional-dependencies"]
    of_extras = [Requirement(text) for texts in extras.values() for text in texts]
    for requirement in (*direct_requirements(), *of_extras):
        if requirement.marker is not None and not requirement.marker.evaluate(of_python(python)):
            continue
        if python == "3.10" and requirement.name in ("transformers", "peft", "datasets", "trackio"):
            continue  # they, or what they need, have no release for it that is pinned
        (specifier,) = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(str(specifier).removeprefix("=="), prereleases=True), requirement


LOCK = (ROOT / "constraints.lock").read_text().replace("\\\n", " ")


def test_the_lock_has_the_same_pins_with_hashes_of_all_but_torch():
    hashes = re.compile(r"\s+--hash=sha256:[0-9a-f]{64}\b")
    for python in SUPPORTED:
        assert pins(hashes.sub("", LOCK), python) == pins(CONSTRAINTS, python), "run scripts/lock"
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not hashes.search(line)] == [f"torch{pins(CONSTRAINTS, '3.12')['torch'][0]}"]


def write_wheel(folder, name, needs="", text=""):
    """A wheel without a module. Returns its SHA-256."""
    path, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info/"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}\n{text}")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_file_with_another_hash_is_not_installed(tmp_path):
    """With the variables of scripts/_setup: a package without a hash needs one that has one."""
    variables = dict(re.findall(r"\b(PIP_\w+)=(\S+)", (ROOT / "scripts/_setup").read_text()))
    assert variables["PIP_CONSTRAINT"] == "constraints.lock"
    write_wheel(tmp_path, "outer", "Requires-Dist: inner")
    lock = f"outer==1\ninner==1 --hash=sha256:{write_wheel(tmp_path, 'inner')}\n"
    install = (sys.executable, "-m", "pip", "install", "--no-index", "--find-links", tmp_path, "outer", "--target")

    def installed(to, lock):
        (tmp_path / "constraints.lock").write_text(lock)
        done = run(*install, tmp_path / to, cwd=tmp_path, **variables)
        return {path.name for path in (tmp_path / to).glob("*-1.dist-info")}, done.stderr

    both = {"outer-1.dist-info", "inner-1.dist-info"}
    assert installed("right", lock)[0] == both
    write_wheel(tmp_path, "inner", text="and more")
    found, said = installed("changed", lock)
    assert found == set()
    assert "DO NOT MATCH THE HASHES" in said
    assert installed("unlocked", lock.partition(" --hash")[0])[0] == both  # control


# The scripts


def test_scripts_support_the_range_that_pyproject_states():
    setup = (ROOT / "scripts/_setup").read_text()
    oldest, newest = map(int, re.search(r"^oldest=(\d+) newest=(\d+)", setup, re.M).groups())
    assert [f"3.{minor}" for minor in range(oldest, newest + 1)] == SUPPORTED
    tried = re.search(r"for python in \$\{PYTHON:-python3 (.*)\}; do", setup)[1].split()
    assert tried == [f"python{version}" for version in reversed(SUPPORTED)]
    stated = SpecifierSet(PROJECT["project"]["requires-python"])
    assert [v for v in (f"3.{minor}" for minor in range(30)) if v in stated] == SUPPORTED


@pytest.mark.parametrize(
    ("minor", "message"),
    [
        (9, "is older than 3.10, and trainapp needs Python 3.10 to 3.14"),
        (15, "is newer than 3.14, and trainapp needs Python 3.10 to 3.14"),
    ],
)
def test_a_python_out_of_range_is_refused_with_the_reason(tmp_path, minor, message):
    scripts = shutil.copytree(ROOT / "scripts", tmp_path / "checkout/scripts")
    python = tmp_path / f"python3.{minor}"
    python.write_text(f"#!/bin/sh\necho {minor}\n")
    python.chmod(0o755)
    done = run(scripts / "train", "model=mlp", cwd=tmp_path, PYTHON=str(python))
    assert done.returncode == 1
    assert f"{python} {message}" in done.stderr
    assert "PYTHON=/path/to/python3.14" in done.stderr
    assert not (scripts.parent / ".venv").exists()


# What contributors and CI use


def test_every_path_that_contributing_names_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:\.ci|conf|docs|scripts|src|tests)/[^` ]*)", text)) | set(
        re.findall(r"\]\(([^)]+)\)", text)
    )
    named |= set(re.findall(r"^((?:scripts|\.ci)/\w+)", text, re.MULTILINE))
    assert len(named) >= 15
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("passes_then", [True, False])
def test_ci_prints_what_failed_once_and_passed_once(tmp_path, passes_then):
    """`scripts/test` here fails at first, as pytest would, and the second time if `passes_then` is false."""
    for folder in (".ci", "scripts", ".venv/bin", ".pytest_cache/v/cache"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    failing = "echo '{\"tests/test_a.py::test_b\": true}' > .pytest_cache/v/cache/lastfailed; exit 1"
    again = "exit 0" if passes_then else "exit 1"
    script = tmp_path / "scripts/test"
    script.write_text(f'case "$*" in *--last-failed*) {again} ;; *) {failing} ;; esac\n')
    script.chmod(0o755)
    done = run("bash", tmp_path / ".ci/run", cwd=tmp_path)
    assert (done.returncode == 0) == passes_then
    flaky = "flaky: 1 failed once and passed once\n  tests/test_a.py::test_b\n"
    assert done.stdout == (flaky if passes_then else "")


# A project with the real scripts and nothing to download; its app prints where and how it was started.
BACKEND = """
import time, zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    time.sleep(float(Path("seconds").read_text()))
    with zipfile.ZipFile(Path(folder, "trainapp-0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("trainapp.pth", f"{Path.cwd()}/src")
        info = "trainapp-0.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: trainapp\\nVersion: 0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "trainapp-0-py3-none-any.whl"
"""


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "src/trainapp").mkdir(parents=True)
    (root / "src/trainapp/__main__.py").write_text("import os, sys\nprint(os.getcwd(), sys.argv[1:])\n")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (root / "backend.py").write_text(BACKEND)
    (root / "constraints.txt").write_text("")
    (root / "constraints.lock").write_text("")
    (root / "seconds").write_text("0")
    return root


def start_train(checkout, cwd):
    return subprocess.Popen(
        [checkout / "scripts/train", "a b", "c=1"],
        cwd=cwd,
        env=CLEAN_ENV | {"PIP_NO_INDEX": "1", "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(checkout, cwd):
    """The exit code, what was printed to stdout, and whether it installed something."""
    process = start_train(checkout, cwd)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, "installing" in err


@pytest.mark.slow
def test_train_installs_when_needed_and_runs_where_it_was_called(checkout, tmp_path):
    here = tmp_path / "elsewhere"
    here.mkdir()
    expected = f"{here} ['a b', 'c=1']\n"
    assert train(checkout, here) == (0, expected, True)
    assert train(checkout, here) == (0, expected, False)

    (checkout / "constraints.txt").write_text("six==1.17.0\n")
    assert train(checkout, here) == (0, expected, True)
    assert train(checkout, here) == (0, expected, False)

    # A failed install is reported and not taken for done, and nothing runs.
    backend = (checkout / "backend.py").read_text()
    (checkout / "backend.py").write_text("def build_editable(*_, **__): raise OSError('no space for this wheel')\n")
    (checkout / "constraints.txt").write_text("")
    process = start_train(checkout, here)
    out, err = process.communicate(timeout=200)
    assert process.returncode != 0
    assert out == ""
    assert "no space for this wheel" in err
    (checkout / "backend.py").write_text(backend)
    assert train(checkout, here) == (0, expected, True)
