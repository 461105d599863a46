"""The files and commands of docs/extending.md work as printed."""

import json

import pytest
from helpers import ROOT, files, result
from markdown import commands, run_command, write_files

DOCUMENT = ROOT / "docs/extending.md"


pytestmark = pytest.mark.slow  # half a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reader's folder, with the files of the page."""
    folder = tmp_path_factory.mktemp("reader")
    assert write_files(DOCUMENT, folder) == files(folder)
    return folder


@pytest.fixture(scope="module")
def done(folder):
    """What each command did there: the command, its process, and the directories of its runs."""
    ended = []
    for words in commands(DOCUMENT):
        before = runs_in(folder)
        process = run_command(words, folder, timeout=120)
        ended.append((words, process, sorted(runs_in(folder) - before)))
    return ended


def runs_in(folder):
    return {path.parent for path in folder.glob("outputs/*/*/result.json")}


def test_every_command_succeeds(done):
    assert len(done) == 9
    for words, process, _ in done:
        assert process.returncode == 0, f"{words}\n{process.stderr}"


def test_the_example_learns(done):
    (run,) = done[0][2]
    ended = result(run)
    assert ended["metric"] == "accuracy"
    assert ended["objective"] >= 0.9
    assert ended["steps"] == 70
    assert "ConvNet with" in done[0][1].stderr


def test_the_second_command_recovers_and_learns_as_well(done):
    (run,) = done[1][2]
    assert result(run)["oom_restarts"] >= 1
    assert result(run)["micro_size"] < 64
    assert result(run)["objective"] >= 0.9


def test_own_model_reads_the_applications_data(done):
    (run,) = done[2][2]
    assert result(run)["steps"] == 23
    assert "image_shape" not in (run / ".hydra/config.yaml").read_text()


def test_help_lists_the_users_options(done):
    shown = done[3][1].stdout
    for line in (
        "model: convnet, gpt, hf, mlp, resnet, vit",
        "experiment: gan, gpt_text, shapes",
        "optimizer: adafactor, adamw, ",
    ):
        assert line in shown
    assert "rmsprop" in next(line for line in shown.splitlines() if line.startswith("optimizer: "))


def test_the_loss_with_a_state_is_exact(done):
    assert "retrying each of the first 3 steps gives the same result" in done[4][1].stderr


def test_a_setting_of_the_machine_reaches_the_run(folder, done):
    (run,) = done[0][2]
    text = (run / ".hydra/config.yaml").read_text()
    assert "num_workers: 0" in text
    (folder / "my_project/local/default.yaml").unlink()
    shown = run_command([*commands(DOCUMENT)[0], "--cfg", "job"], folder, timeout=60)
    assert "num_workers: auto" in shown.stdout


def test_the_gan_trains(done):
    plain, limited = (run for _, _, (run,) in done[5:7])
    assert result(plain)["steps"] == result(limited)["steps"] == 46
    assert result(plain)["oom_restarts"] == 0
    assert set(result(plain)["micro_schedule"]) == {"discriminator", "generator"}
    lines = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert {"discriminator/loss", "discriminator/right", "generator/loss", "generator/lr"} <= lines[-1].keys()
    assert (lines[-1]["discriminator/lr"], lines[-1]["generator/lr"]) == (2e-3, 1e-3)


def test_a_run_learns_from_its_teacher(done):
    (run,) = done[8][2]
    assert result(run)["objective"] >= 0.85
    assert result(run)["best_step"] > 0
