"""README.md: every command in it works, and the output it shows is what the program prints."""

import re
import subprocess
from importlib.util import find_spec

import pytest
from helpers import ROOT, environment, incidents, metrics, result, run_cli
from markdown import blocks, commands, with_this_python

DOCUMENT = ROOT / "README.md"
pytestmark = pytest.mark.timeout(900)  # a dozen runs in a row: half a minute on idle cores
# A test need not wait as long as a reader: these are appended to commands that train.
SHORT = {
    "memory.limit=": ("train.max_steps=12",),
    "outputs/first": (),  # resuming has its own length
    "-m": ("train.max_steps=2", "model.width=8"),
    "eval": (),
    "": ("train.max_steps=6",),
}
TRAINING = ("scripts/train", "trainapp", "python")


def shortened(words):
    if words[0] not in TRAINING:
        return words
    return words + list(next(more for part, more in SHORT.items() if part in " ".join(words)))


def recovers(words):
    return any(word.startswith("memory.limit=") for word in words)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A reader's directory, and what each command of the README did there, in order."""
    folder = tmp_path_factory.mktemp("reader")
    env = environment({"TRAINAPP_CACHE": str(folder / "cache")})
    done = []
    for words in commands(DOCUMENT):
        if words[0] == "scripts/test":  # this very test suite
            assert (ROOT / "scripts/test").stat().st_mode & 0o100
            continue
        if "model=hf" in words and find_spec("transformers") is None:  # an extra
            continue
        command = with_this_python(shortened(words))
        if words[0] == "tensorboard":
            command.append("--inspect")  # reads the same files, then exits
        before = set(folder.glob("outputs/**/result.json"))
        process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        new = sorted(path.parent for path in set(folder.glob("outputs/**/result.json")) - before)
        done.append((words, process, new))
    return folder, done


def find(session, part):
    """The first command that contains this part: its process and its run directories."""
    _, done = session
    return next((process, runs) for words, process, runs in done if part in " ".join(words))


def test_every_command_succeeds(session):
    _, done = session
    assert len(done) >= 9
    for words, process, _ in done:
        assert process.returncode == 0, f"{words}\n{process.stdout}{process.stderr}"


def test_the_second_thing_to_try_meets_a_real_error_and_recovers(session):
    process, (run,) = find(session, "memory.limit=")
    (only,) = incidents(run)
    assert " as planned in " in only["action"]
    assert result(run)["steps"] == 12
    assert (result(run)["oom_restarts"], result(run)["micro_size"]) == (1, only["new_size"])
    assert result(run)["peak_memory_bytes"] <= 48 * 2**20
    assert {line["batch/global_size"] for line in metrics(run)} == {64}
    shown = next(text for text in blocks(DOCUMENT, "text") if "out of memory" in text)
    # The README shows word for word what a reader sees of the recovery and of its result.
    printed, shown = process.stderr.splitlines(), shown.splitlines()
    assert story(printed) == story(shown)
    assert len(story(shown)) == 3
    for row in ("micro-batch ", "OOM restarts "):
        assert [x for x in process.stdout.splitlines() if x.startswith(row)] == [x for x in shown if x.startswith(row)]


def story(lines):
    """Lines between the first, about the whole run, and the first log step; without numbers that depend on time."""
    end = next(number for number, line in enumerate(lines) if line.startswith(("step 10/", "...")))
    return [re.sub(r"[\d.]+ s\b", "N s", line) for line in lines[1:end]]


def without_times(line):
    """Times are this machine's, and with them the levers whose largest micro-batch is searched."""
    return re.sub(r" +(\d+|-) +x \d+\.\d\d", "  N  x T", line)


def test_the_plan_it_shows_is_the_one_that_is_printed(session):
    process, _ = find(session, "mode=plan")
    shown = next(text for text in blocks(DOCUMENT, "text") if "largest sizes that fit" in text).splitlines()
    printed = [without_times(line) for line in process.stdout.splitlines()]
    expected = [without_times(line) for line in shown if line != "..."]
    assert [line for line in expected[:-1] if line not in printed] == []
    assert printed[0] == expected[0]
    # Which is the fastest depends on the processor: on one with products in bf16 it is precision=bf16.
    for last in (printed[-1], expected[-1]):
        assert re.fullmatch(r"(\S+=\S+ )*batch\.micro_size=\d+ batch\.eval_micro_size=128", last)


def test_sweep_makes_a_directory_for_each_combination(session):
    _, runs = find(session, "-m model=mlp,resnet")
    assert len(runs) == 4


def test_resuming_goes_on_in_the_same_directory(session):
    folder, _ = session
    (first, _), steps = find(session, "outputs/first"), metrics(folder / "outputs/first")
    assert "resumed" not in first.stderr
    assert [line["step"] for line in steps] == sorted({line["step"] for line in steps})
    ended = result(folder / "outputs/first")
    assert ended["samples"] == 3 * 1437
    evaluated, _ = find(session, "mode=eval")
    assert re.search(rf"^eval accuracy +{ended['objective']:.4f}", evaluated.stdout, re.MULTILINE)


def test_tensorboard_finds_the_runs(session):
    process, _ = find(session, "tensorboard")
    assert "memory/peak" in process.stdout


def test_table_of_groups_is_that_of_the_program():
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE))
    options = {
        folder.name: {path.stem for path in folder.glob("*.yaml")}
        for folder in (ROOT / "conf").iterdir()
        if folder.is_dir()
    }
    assert {group: set(re.findall(r"`(\w+)`", cell)) for group, cell in table.items()} == options


def test_every_file_it_points_to_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", DOCUMENT.read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.slow
def test_the_scarce_run_ends_with_the_same_quality(tmp_path):
    for name, limit in (("plenty", []), ("scarce", ["memory.limit=48MiB"])):
        settings = ("model=resnet", "train.max_epochs=4", *limit, f"hydra.run.dir={tmp_path / name}")
        done = run_cli(*settings, cwd=tmp_path, timeout=290)
        assert done.returncode == 0, done.stderr
    plenty, scarce = result(tmp_path / "plenty"), result(tmp_path / "scarce")
    assert plenty["oom_restarts"] == 0
    assert scarce["oom_restarts"] >= 1
    assert scarce["samples"] == plenty["samples"]
    assert plenty["objective"] >= 0.95
    assert scarce["objective"] == pytest.approx(plenty["objective"], abs=0.02)
