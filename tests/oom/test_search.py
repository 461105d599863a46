"""The search for the size: where it ends, what it costs, and that it always ends."""

import logging
import re

import pytest
import runs
import torch
from harness import Recorded

from .conftest import limit_between, tiny

# 64 inputs, two hidden layers: bytes grow linearly with the batch.
LINEAR = ("model=mlp", "model.width=64", "data=digits", "optimizer=sgd", "train.ema=null", "batch.micro_size=auto")


@pytest.mark.slow
@pytest.mark.parametrize("global_size", [128, 256])
@pytest.mark.parametrize(("grow", "wanted"), [(True, range(95, 101)), (False, range(64, 65))])
def test_where_100_fits(tmp_path, global_size, grow, wanted, caplog):
    caplog.set_level(logging.INFO)
    limit = limit_between(tmp_path, (*LINEAR, f"batch.global_size={global_size}"), 100, 101)
    overrides = (f"batch.global_size={global_size}", f"memory.limit={limit}", f"oom.grow={str(grow).lower()}")
    recorded = Recorded(tiny(tmp_path / "run", *LINEAR, "train.max_steps=null", "train.max_epochs=4", *overrides))
    micro = recorded.run.sizes.train
    assert micro.size in wanted
    halvings = {128: 1, 256: 2}[global_size]
    assert len(recorded.failures) <= halvings + (2 if grow else 0)
    assert recorded.run.memory.peak <= limit
    if grow:
        assert micro.search_has_ended
        assert sum(text.endswith(f"with micro-batch {micro.size}") for text in caplog.messages) == 1


def test_an_evaluation_that_is_one_batch_fails_once_for_it(tmp_path):
    """Every size above 360 evaluates the 360 digits as one batch."""
    changes = {"batch.eval_micro_size": 2880, "batch.micro_size": 8, "batch.global_size": 8, "every.eval": 1}
    changes["train.max_steps"] = 1
    peak = Recorded(tiny(tmp_path / "a", *LINEAR, changes=changes | {"batch.eval_micro_size": 180})).run.memory.peak
    recorded = Recorded(tiny(tmp_path / "b", *LINEAR, changes=changes | {"memory.limit": peak}))
    assert [(f.phase, f.recovery.old_size, f.recovery.new_size) for f in recorded.failures] == [("evaluate", 360, 180)]
    assert recorded.run.memory.peak <= peak


@pytest.mark.slow
def test_a_resume_with_a_smaller_limit_begins_with_what_fits(tmp_path, caplog):
    """By the peaks that were measured before: from the whole batch on, memory runs out five times."""
    caplog.set_level(logging.INFO)
    settings = (*LINEAR, "batch.global_size=256", "schedule=constant", "every.eval=null", "oom.clean_steps=1")
    limit_before = limit_between(tmp_path, settings, 100, 101)
    limit = limit_between(tmp_path, settings, 25, 26)

    def trained(name, limit, steps):
        overrides = (*runs.TINY, *settings, f"memory.limit={limit}", f"train.max_steps={steps}")
        return Recorded(runs.configure(tmp_path / name, *overrides))

    for name in ("a", "b"):
        assert trained(name, limit_before, 12).run.sizes.train.size == 97
    undisturbed = trained("a", limit_before, 20)
    resumed = trained("b", limit, 20)
    assert len(resumed.failures) <= 1
    assert 23 <= resumed.run.sizes.train.size <= 25
    assert "training begins with micro-batch 2" in caplog.text
    assert "from scratch" not in caplog.text
    for ours, theirs in zip(
        resumed.run.state.model.parameters(), undisturbed.run.state.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_run_resumed_in_the_search_tries_the_same_sizes_in_the_same_steps(tmp_path, stop):
    """Also after a stop between the clean steps of a size: results would differ in the last bits, and with BatchNorm
    in more.
    """
    limit = limit_between(tmp_path, (*LINEAR, "batch.global_size=128"), 50, 51)
    limited = (*LINEAR, "batch.global_size=128", f"memory.limit={limit}", "schedule=constant", "every.eval=null")
    for name, steps in (("whole", 9), ("parts", stop), ("parts", 9)):
        runs.run(tmp_path / name, *runs.TINY, *limited, f"train.max_steps={steps}")
    whole, parts = (runs.end(tmp_path / name, 9) for name in ("whole", "parts"))
    assert runs.differences(whole, parts) == []
    used = [runs.saved(tmp_path / name, 9)["sizes"]["used"] for name in ("whole", "parts")]
    assert used[0] == used[1]
    assert len(used[0][""]) >= 3  # it has grown in the end


def test_after_the_last_step_no_larger_size_is_announced(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    limit = limit_between(tmp_path, (*LINEAR, "batch.global_size=128"), 50, 51)
    limited = (*LINEAR, "batch.global_size=128", f"memory.limit={limit}", "every.eval=null")
    runs.run(tmp_path / "long", *runs.TINY, *limited, "train.max_steps=9")
    pattern = re.compile(r"step (\d+) tries a larger micro-batch")
    steps = [int(match[1]) for match in map(pattern.match, caplog.messages) if match]
    caplog.clear()
    runs.run(tmp_path / "short", *runs.TINY, *limited, f"train.max_steps={steps[0] - 1}")
    assert not any(pattern.match(text) for text in caplog.messages)
