"""docs/metrics_and_callbacks.md: its files and its first commands work as printed."""

import re
import shlex

import pytest
import runs
from helpers import ROOT, evaluations, result, run_cli, scalars
from markdown import write_files

PAGE = ROOT / "docs/metrics_and_callbacks.md"


def words(part):
    """The words after `trainapp model=mlp` of the page's first command that has this part."""
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("trainapp ") and part in line)
    return [word for word in shlex.split(line)[2:] if not word.startswith("user_packages")]


@pytest.mark.slow
def test_the_metric_the_callback_and_the_tracker_of_the_page(tmp_path):
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    assert write_files(PAGE, tmp_path) == {"my_callbacks.py", "my_trackers.py"}
    chosen = [*words("metrics.f1"), *words("callbacks.norms"), *words("tracker.lines")]
    quick = ("model=mlp", "train.max_epochs=1", "model.width=16", "train.device=cpu", "hydra.run.dir=run")
    done = run_cli(*quick, "user_packages=[my_callbacks,my_trackers]", *chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert result(run)["objective"] == evaluations(run)[-1]["f1"]
    tags = {tag: values for tag, values in scalars(run).items() if tag.startswith("norm/")}
    assert len(tags) == 6
    assert all(set(values) == {5, 10, 15, 20} for values in tags.values())
    lines = (run / "lines.txt").read_text().splitlines()
    assert {line.split()[0] for line in lines} >= {"train", "eval"}


@pytest.mark.slow
def test_the_task_of_the_page_passes_arguments_to_all_metrics(tmp_path):
    """The page's function, on digits as ten numbers to regress."""
    (body,) = re.findall(r"```python\n(def regression.*?)```", PAGE.read_text(), re.DOTALL)
    body = body.replace('batch["targets"]', 'F.one_hot(batch["targets"], 10).float()')
    (tmp_path / "page_task.py").write_text(f"from torch.nn import functional as F\n\n\n{body}")
    squares = "class Squares:\n    def reset(self): self.sum = self.count = 0\n    def __init__(self): self.reset()\n"
    squares += "    def update(self, a, b): self.sum += float(((a - b) ** 2).sum()); self.count += len(a)\n"
    squares += "    def compute(self): return self.sum / self.count\n"
    (tmp_path / "page_metric.py").write_text(squares)
    chosen = ("task=page_task.regression", "user_packages=[page_task,page_metric]", "every.eval=4", *runs.TINY[:2])
    metric = "+metrics.mine={_target_: page_metric.Squares}"
    done = run_cli(*runs.MODELS["mlp"], *chosen, metric, "train.max_steps=4", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = evaluations(tmp_path / "run")
    assert line["mine"] == pytest.approx(line["loss"], rel=1e-5)
