"""README.md: every command in it works, and the output it shows is what the program prints."""

import re
import subprocess

import pytest
from helpers import ROOT, environment, metrics, result, run_cli
from markdown import blocks, commands, with_this_python

DOCUMENT = ROOT / "README.md"
# A test need not wait as long as a reader: these are appended to commands that train.
SHORT = {
    "memory.limit=48MiB train.device=cpu train.max_epochs=1": ("train.max_steps=3",),
    "mode=plan": ("plan.techniques=false",),
    "outputs/first": (),  # resuming has its own length
    "-m": ("train.max_steps=2", "model.width=8"),
    "outputs/sweep": (),
    "--": (),
}
TRAINING = ("scripts/train", "trainapp", "python")


def shortened(words):
    if words[0] not in TRAINING:
        return words
    return words + list(next(more for part, more in SHORT.items() if part in " ".join(words)))


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A reader's directory, and what each command of the README did there, in order."""
    folder = tmp_path_factory.mktemp("reader")
    env = environment({"TRAINAPP_CACHE": str(folder / "cache")})
    done = []
    for words in commands(DOCUMENT):
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_does_what_it_says(session):
    """One after the other, as a reader would."""
    folder, done = session
    assert len(done) >= 8
    for words, process, _ in done:
        expected = 1 if words[:2] == ["trainapp", "diff"] else 0  # those two runs differ
        assert process.returncode == expected, f"{words}\n{process.stdout}{process.stderr}"

    process, (run,) = find(session, "scripts/train model=resnet memory.limit=")
    assert result(run)["oom_restarts"] >= 1
    assert result(run)["peak_memory_bytes"] <= 48 * 2**20
    assert {line["batch/global_size"] for line in metrics(run)} == {64}
    shown = next(text for text in blocks(DOCUMENT, "text") if "out of memory" in text).splitlines()
    assert shown[0] in process.stderr.splitlines()
    for row in shown[3:]:
        name = re.match(r"\S+ \S+|\S+", row)[0]
        assert any(line.startswith(name) for line in process.stdout.splitlines()), row

    plan, _ = find(session, "mode=plan")
    assert "largest that fits 48.0 MiB" in plan.stdout
    assert re.fullmatch(r"(\S+=\S+ )*batch\.micro_size=\d+", plan.stdout.splitlines()[-1])

    _, runs = find(session, "-m model=mlp,resnet")
    assert len(runs) == 4
    compared, _ = find(session, "trainapp diff")
    assert re.search(r"^  model._target_ +trainapp.models.mlp.MLP -> \S+ResNet$", compared.stdout, re.MULTILINE)
    assert compared.stdout.splitlines()[-1].startswith("different from step 2 on (loss")  # the last

    (first, _), steps = find(session, "outputs/first"), metrics(folder / "outputs/first")
    assert "resumed" not in first.stderr
    assert [line["step"] for line in steps] == sorted({line["step"] for line in steps})
    ended = result(folder / "outputs/first")
    assert ended["samples"] == 3 * 1437
    evaluated, _ = find(session, "mode=eval")
    assert re.search(rf"^eval accuracy +{ended['objective']:.4f}", evaluated.stdout, re.MULTILINE)

    assert "memory/peak" in find(session, "tensorboard")[0].stdout


def test_the_first_screen_shows_the_proof():
    lines = DOCUMENT.read_text().splitlines()
    assert any("memory.limit=48MiB" in line for line in lines[:12])
    assert any("out of memory at step 1" in line for line in lines[:12])


def test_table_of_groups_is_that_of_the_program():
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE))
    options = {
        folder.name: {path.stem for path in folder.glob("*.yaml")}
        for folder in (ROOT / "conf").iterdir()
        if folder.is_dir() and folder.name != "hydra"
    }
    assert {group: set(re.findall(r"`(\w+)`", cell)) for group, cell in table.items()} == options


def test_every_link_leads_somewhere():
    for page in (DOCUMENT, *(ROOT / "docs").glob("*.md")):
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page}: {link}"
            if anchor and target.suffix == ".md":
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in anchors, f"{page}: {link}#{anchor}"


@pytest.mark.nightly  # 90 s; that a run with less memory computes the same is tested exactly elsewhere
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
