"""A step on embeddings is planned with all its micro-batches, whose inputs and embeddings stay in memory."""

import measured
import pytest
import runs

from trainapp.assembly.components import load_components
from trainapp.planning.traced_run import trace

CHOSEN = (
    *("model=mlp", "model.width=16", "data._target_=trainapp.data.sets.digits.DigitPairs"),
    *("every.eval=4", "memory.limit=1GiB", "train.grad_clip=null"),
    *("batch.eval_micro_size=50", "batch.global_size=128"),
)


@pytest.mark.parametrize("size", [8, 128])
def test_the_plan_has_all_embeddings(tmp_path, size):
    config = runs.configure(tmp_path, *CHOSEN)
    found = trace(config, load_components(config), size, 50)
    training, evaluation = measured.peaks(tmp_path / "real", *CHOSEN, f"batch.micro_size={size}")
    assert (found.training.total, found.evaluation.total) == (training, evaluation)
