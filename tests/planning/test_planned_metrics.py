"""What metrics with a state allocate is in the plan; callbacks are not called by it."""

import measured
import own_hooks
import pytest
import runs

from trainapp.planning.traced_run import trace
from trainapp.train.components import load_components

CHOSEN = (
    *runs.MODELS["mlp"],
    "every.eval=4",
    "batch.eval_micro_size=50",
    "memory.limit=1GiB",
    "train.grad_clip=null",
    "user_packages=[own_hooks]",
)
METRICS = {
    "counts": ("callbacks=confusion_matrix",),
    "predictions": ("callbacks=predictions",),
    "whole object": ("+metrics.mine={_target_: own_hooks.Large}",),
    "list": ("+metrics.mine={_target_: own_hooks.Keeps}",),
    "f1": ("+metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, average: macro}",),
    "auroc": ("+metrics.auroc={_target_: torchmetrics.AUROC, task: multiclass}",),
}
GROWING = ("list", "auroc")  # they keep all samples


@pytest.mark.parametrize("kind", METRICS)
def test_the_traced_evaluation_has_what_metrics_allocate(tmp_path, kind):
    if kind in ("f1", "auroc"):
        pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    config = runs.configure(tmp_path, *CHOSEN, *METRICS[kind], "objective=min loss")
    components = load_components(config)
    found = trace(config, components, 16, 50)
    again = trace(config, components, 16, 50)  # nothing of the first is left in the metrics
    assert (again.training.total, again.evaluation.total) == (found.training.total, found.evaluation.total)
    training, evaluation = measured.peaks(tmp_path / "real", *CHOSEN, *METRICS[kind])
    assert found.training.total == training
    plain = measured.peaks(tmp_path / "plain", *CHOSEN)[1]
    assert (evaluation > plain) is (kind != "predictions")  # which keeps no tensors
    if kind in GROWING:
        assert found.unsettled == ("metrics keep more with every batch of an evaluation",)
        assert plain <= found.evaluation.total < evaluation
    else:
        assert found.unsettled == ()
        assert found.evaluation.total == evaluation


def test_an_objective_that_is_computed_from_values(tmp_path):
    config = runs.configure(tmp_path, *CHOSEN, "+metrics.mine={_target_: own_hooks.Unmergeable}", "objective=max mine")
    assert trace(config, load_components(config), 0, 50).evaluation.total > 0


def test_callbacks_are_not_called(tmp_path):
    own_hooks.SEEN.clear()
    config = runs.configure(tmp_path, *CHOSEN, "+callbacks.mine={_target_: own_hooks.Records}")
    trace(config, load_components(config), 16, 50)
    assert own_hooks.SEEN == []
