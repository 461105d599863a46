"""`report.html`: what it says of runs and sweeps that the command line has made, and that a browser can draw it."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import runs
from helpers import environment, evaluations, incidents, metrics, result, run_cli, train

from trainapp.files import each_json_line, strict_json
from trainapp.report import page, run_files
from trainapp.report.run_files import Curve

OOMS = (*runs.TINY, *runs.MODELS["mlp"], "model.width=64", "train.max_steps=12", "every.eval=6", "memory.limit=190KB")
OOMS = (*OOMS, "batch.global_size=64", "oom.clean_steps=1")
CRUEL = "</script><b>ü & $x"
SWEEP = ("-m", *runs.TINY, *runs.MODELS["mlp"], "every.eval=2", "optimizer.lr=1e-9,1e-1", "train.seed=0,1")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def embedded(path: Path) -> dict:
    """The data of a page that is one file, with nothing from elsewhere."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    (namespace,) = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert namespace == "http://www.w3.org/2000/svg"  # a name, which nothing loads
    assert not re.search(r"<link|<img|@import|url\((?!#)|\bsrc=", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def points(curve: dict) -> list[tuple]:
    return list(zip(curve["x"], curve["y"], strict=True))


def logged(lines: list[dict], name: str) -> list[tuple]:
    return [(line["step"], pytest.approx(line[name], rel=1e-5)) for line in lines if name in line]


def table_of(found: dict, title: str) -> list[dict]:
    """The rows of a section's first table, by header."""
    (section,) = (own for own in found["sections"] if own["title"] == title)
    table = next(item for item in section["items"] if item["kind"] == "table")
    return [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]


@pytest.fixture(scope="module")
def with_ooms(tmp_path_factory):
    """A run with out-of-memory errors, and a text that would end the data's element."""
    run = tmp_path_factory.mktemp("runs") / "scarce"
    train(run, *OOMS, "schedule=linear", f"generate.prompts=['{CRUEL}']")
    return run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    done = run_cli(*SWEEP, "hydra.sweep.dir=search", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "search"


@pytest.mark.slow
def test_a_run_writes_what_it_has_logged(with_ooms):
    found = embedded(with_ooms / "report.html")
    (run,) = found["runs"]
    assert (run["name"], run["state"], run["result"]["steps"]) == ("scarce", "finished", 12)
    for group, lines in (("train", metrics(with_ooms)), ("eval", evaluations(with_ooms))):
        assert points(run["curves"][group]["loss"]) == logged(lines, "loss")
    assert {"lr", "grad_norm", "samples_per_second", "data_wait", "memory/peak"} <= run["curves"]["train"].keys()
    errors = incidents(with_ooms)
    assert len(errors) >= 2
    for shown, error in zip(run["ooms"], errors, strict=True):
        assert shown == {name: error[name] for name in shown}
        assert sum(shown["by_category"].values()) == error["used"]
    schedule = result(with_ooms)["micro_schedule"]
    assert points(run["sizes"]) == sorted((int(step), size) for step, size in schedule.items())
    assert "parameters on cpu" in run["headline"]
    assert all("parameters on" not in own["text"] and "evaluated" not in own["text"] for own in run["notes"])
    assert "schedule=linear" in run["overrides"]
    assert (run["settings"]["schedule.shape"], run["settings"]["train.max_steps"]) == ("linear", "12")
    assert run["settings"]["generate.prompts"] == json.dumps([CRUEL], ensure_ascii=False)
    assert "schedule=linear" in run["command"]
    assert run["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "trainapp", "host", "started", "cwd"} <= run["environment"].keys()
    table = table_of(found, "Incidents")
    assert [row["what followed"] for row in table] == [error["action"] for error in errors]
    (settings,) = (own for own in found["sections"] if own["title"] == "Configuration")
    code, table = settings["items"]
    assert "schedule=linear" in code["text"].splitlines()
    assert ["train.max_steps", "12"] in [table["rows"][at] for at in table["marked"]]


@pytest.mark.slow
def test_while_it_runs(with_ooms, tmp_path):
    """What a run has left that was killed while it wrote a line, or still runs."""
    run = tmp_path / "running"
    shutil.copytree(with_ooms, run)
    for name in ("result.json", "report.html", "evaluations.jsonl"):
        (run / name).unlink()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: len(text) - 30])
    done = run_cli("report", "running", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(run / "report.html"))
    (shown,) = embedded(run / "report.html")["runs"]
    assert (shown["state"], shown["sizes"], shown["result"]) == ("not finished", None, {})
    assert points(shown["curves"]["train"]["loss"]) == logged(metrics(with_ooms)[:-1], "loss")
    assert shown["curves"]["eval"] == {}
    assert run_cli("leaderboard", "running", cwd=tmp_path).returncode == 0
    assert "runs" in embedded(run / "report.html")  # a table of one run leaves the run's page


@pytest.mark.slow
def test_runs_over_each_other_without_importing_torch(with_ooms, tmp_path):
    shutil.copytree(with_ooms, tmp_path / "b/scarce")
    config = tmp_path / "b/scarce/.hydra/config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 7", 1))
    start = f"import sys; sys.argv[1:] = ['report', {str(with_ooms)!r}, 'b/scarce']; from trainapp.__main__ import main"
    check = "main(); assert not {'torch', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{start}; {check}"], cwd=tmp_path, env=environment())
    assert done.returncode == 0
    found, names = embedded(tmp_path / "report.html"), [f"{with_ooms.parent.name}/scarce", "b/scarce"]
    assert [run["name"] for run in found["runs"]] == names
    assert table_of(found, "Settings that differ") == [{"setting": "train.seed", names[0]: "0", names[1]: "7"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "trainapp report: give the directory"),
        (["nowhere"], "there is no such directory"),
        (["empty"], "no sweep and no runs are here"),
        (["empty", "empty"], "no run is here"),
    ],
)
def test_what_has_no_page(tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    done = run_cli("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_value_that_is_not_finite_is_a_gap(tmp_path):
    task = ("user_packages=[own_tasks]", "task=own_tasks.InfOnce", "every.eval=2", "data.num_workers=0")
    runs.run(tmp_path, *runs.MODELS["mlp"], *task)
    (run,) = embedded(tmp_path / "report.html")["runs"]
    assert points(run["curves"]["eval"]["ratio"]) == [(2, None), (4, 0.5)]


@pytest.mark.usefixtures("one_thread")
def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog, capsys):
    (tmp_path / "report.html").mkdir()
    assert runs.run(tmp_path, *runs.MODELS["mlp"]).steps == 4
    assert caplog.text.count("report.html cannot be written") == 1
    assert helpers.result(tmp_path)["steps"] == 4


def test_only_training_writes_a_page(tmp_path):
    runs.run(tmp_path / "run", *runs.MODELS["mlp"])
    runs.run(tmp_path / "eval", *runs.MODELS["mlp"], "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    assert sorted(path.parent.name for path in tmp_path.glob("*/report.html")) == ["run"]


def curve_of(values) -> Curve:
    curve = Curve()
    for step, value in enumerate(values):
        curve.steps.append(step)
        curve.values.append(value)
    return curve


def test_a_long_curve_keeps_its_extremes_and_gaps():
    values = [math.sin(step / 50) + step / 20_000 for step in range(20_000)]
    values[777], values[12_345], values[5_000] = 99.0, -99.0, math.nan
    found = points(curve_of(values).points(2000))
    assert 1000 < len(found) <= 2003
    assert {(777, 99.0), (12_345, -99.0), (5_000, None), (0, 0.0)} <= set(found)
    assert found[-1][0] == 19_999
    assert [step for step, _ in found] == sorted({step for step, _ in found})


def test_a_flat_part_needs_two_points():
    assert points(curve_of([1, 1, 1, 1, 2, 2, 2, math.nan, 2]).points(2000)) == [
        *((0, 1), (3, 1), (4, 2), (6, 2), (7, None), (8, 2)),
    ]


def test_many_long_curves_share_the_room_of_a_page(tmp_path):
    names = [f"f1/{number}" for number in range(60)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 3001):
            noise = {name: math.sin(step * (place + 1.7)) for place, name in enumerate(names)}
            file.write(strict_json({"step": 10**6 + step, **noise, "epoch": 1.0}) + "\n")
    page.write_runs([tmp_path], tmp_path / "report.html")
    (run,) = embedded(tmp_path / "report.html")["runs"]
    lengths = [len(curve["x"]) for curve in run["curves"]["train"].values()]
    assert 0.8 * run_files.POINTS < sum(lengths) <= run_files.POINTS
    assert points(run["curves"]["train"]["epoch"]) == [(10**6 + 1, 1.0), (10**6 + 3000, 1.0)]


@pytest.mark.slow
def test_a_sweep_writes_its_jobs_the_best_first(sweep):
    found = embedded(sweep / "report.html")
    assert (found["metric"], found["direction"], found["settings"]) == (
        "accuracy",
        "max",
        ["optimizer.lr", "train.seed"],
    )
    assert [job["number"] for job in sorted(found["jobs"], key=lambda job: int(job["name"]))] == [0, 1, 2, 3]
    best = [job["value"] for job in found["jobs"]]
    assert best == sorted((result(sweep / str(job))["best_objective"] for job in range(4)), reverse=True)
    for job in found["jobs"]:
        assert job["settings"] == [["1e-09", "0.1"][job["number"] // 2], str(job["number"] % 2)]
    seeds, jobs = (table_of(found, title) for title in ("Over seeds: mean and standard deviation", "Leaderboard"))
    assert [row["optimizer.lr"] for row in seeds] == ["0.1", "1e-09"]
    assert [" ± " in row["accuracy (max)"] for row in seeds] == [True, True]
    assert [row["job"] for row in jobs] == [
        {"text": job["name"], "page": f"{job['name']}/report.html"} for job in found["jobs"]
    ]
    assert all((sweep / row["job"]["page"]).is_file() for row in jobs)


@pytest.mark.slow
def test_a_sweep_that_still_runs(sweep, tmp_path):
    """A journal in which one job has failed, another has started, and the rest has not begun."""
    folder = tmp_path / "running"
    shutil.copytree(sweep / "1", folder / "1")
    lines = [line for line in each_json_line(sweep / "sweep.jsonl") if line.get("number") in (None, 0, 1)]
    ends = [line for line in lines if line["event"] == "end"]
    lines.remove(ends[1])
    ends[0] |= {"state": "failed", "error": CRUEL, "facts": {}}
    (folder / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_cli("report", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = embedded(folder / "report.html")
    assert [row["state"] for row in table_of(found, "Leaderboard")] == ["finished", "failed"]  # its result.json says so
    assert table_of(found, "Failed jobs") == [{"job": "0", "error": CRUEL}]
    assert [job["name"] for job in found["jobs"]] == ["1"]


def charts_drawn(path: Path, folder: Path) -> int:
    """How many charts a browser draws, without an error."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000")
    done = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={folder / 'browser'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment({"HOME": str(folder)}),
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title, figures = re.search("<title>(.*?)</title>", done.stdout), re.findall(r"<figure.*?</figure>", done.stdout)
    assert title[1].endswith("(trainapp)")  # the script sets it
    assert "Written by trainapp" in done.stdout  # at the end of the page
    for figure in figures:
        assert re.search(r'<path class="curve" d="M|<circle|<rect[^>]* style="fill', figure), figure
        assert "NaN" not in figure
    return len(figures)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH")
def test_a_browser_draws_every_chart(with_ooms, sweep, tmp_path):
    (run,) = embedded(with_ooms / "report.html")["runs"]
    names = run["curves"]["train"].keys() | run["curves"]["eval"].keys()
    memory = 2  # over time with the micro-batch below, and by category
    assert charts_drawn(with_ooms / "report.html", tmp_path) == len(names) + memory
    page.write_runs([with_ooms, sweep / "0"], tmp_path / "both.html")
    assert charts_drawn(tmp_path / "both.html", tmp_path) == len(names) + memory
    settings = 2
    assert charts_drawn(sweep / "report.html", tmp_path) == settings + 2  # history, parallel coordinates
    shutil.copytree(with_ooms / ".hydra", tmp_path / "begun/.hydra")
    page.write_runs([tmp_path / "begun"], tmp_path / "begun.html")
    assert charts_drawn(tmp_path / "begun.html", tmp_path) == 0
