"""plan.json has the same keys whatever comes out, and docs/memory.md describes each of them."""

import json
import re

import pytest
import runs
from helpers import ROOT, run_cli

import trainapp
from trainapp.planning.answer import complete

GPT = (*runs.MODELS["gpt"], "train.device=cpu", "batch.global_size=8", "every.eval=null")
# A forward that raises without data, so that nothing can be traced.
NOT_TRACEABLE = (
    "from torch import nn\n"
    "class Net(nn.Module):\n"
    "    def __init__(self, num_classes: int):\n"
    "        super().__init__()\n"
    "        self.linear = nn.Linear(64, num_classes)\n"
    "    def forward(self, inputs):\n"
    "        raise RuntimeError('no forward')\n"
)


def documented():
    """The first column of the table of keys."""
    page = (ROOT / "docs" / "memory.md").read_text()
    table = page.partition("| key |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "outcome", [("plan.levers=true",), ("plan.levers=false",), ("plan.levers=false", "data.min_length=4")]
)
def test_the_keys_do_not_depend_on_the_outcome(outcome):
    """Exact with and without levers, and a range."""
    facts = trainapp.plan([*GPT, *outcome])
    assert facts.keys() == documented()
    assert isinstance(facts["notes"], list)
    assert (facts["range_bytes"] is None) is (facts["certainty"] == "exact")
    assert bool(facts["levers"]) is (facts["best"] is not None) is ("plan.levers=true" in outcome)
    for entry in (*facts["levers"], *([facts["best"]] if facts["best"] else [])):
        assert entry["reserved_bytes"] is None


@pytest.mark.slow
def test_nor_on_whether_there_is_a_plan(tmp_path):
    """The file of one that is not traceable, and of a job of a sweep that was refused."""
    (tmp_path / "untraceable.py").write_text(NOT_TRACEABLE)
    own = ("model._target_=untraceable.Net", "~model.width", "~model.depth", "~model.dropout")
    own = ("model=mlp", *own, "user_packages=[untraceable]", "data=digits", "train.device=cpu")
    done = run_cli("-m", "mode=plan", *own, "train.seed=1", "hydra.sweep.dir=sweep", cwd=tmp_path)
    refused = run_cli("-m", "mode=plan", *GPT, "model.width=-1", "hydra.sweep.dir=refused", cwd=tmp_path)
    assert (done.returncode, refused.returncode) == (0, 2), done.stderr
    for folder in ("sweep/0", "refused/0"):
        facts = json.loads((tmp_path / folder / "plan.json").read_text())
        assert facts.keys() == documented()
        assert facts["reason"]
        assert facts["peak_bytes"] is None


def test_an_undocumented_key_is_noticed():
    with pytest.raises(AssertionError, match="peek_bytes"):
        complete({"peek_bytes": 1})
