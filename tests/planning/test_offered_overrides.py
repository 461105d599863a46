"""What a plan, and a run that cannot continue, offer to paste starts as it stands, for shipped and for own parts."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import runs
from helpers import run_cli

import trainapp
from trainapp.config import compose
from trainapp.config.pasted import startable
from trainapp.errors import UserError
from trainapp.run import runner

TINY = (*runs.TINY, "checkpointing=off", "train.max_steps=1", "batch.global_size=8")
TINY = (*TINY, "data=digits")
MLP = ("model=mlp", "model.width=64")
INLINE = ("model=mlp", "model._target_=offered_parts.Net", "~model.width", "~model.depth", "~model.dropout")
CASES = {
    "shipped": MLP,
    "a value that other optimizers lack": (*MLP, "optimizer=sgd", "optimizer.momentum=0.5"),
    "an argument that only the command line has": (*MLP, "+optimizer.amsgrad=true", "optimizer.fused=false"),
    "own files": ("model=own", "optimizer=plain", "user_packages=[offered_parts]"),
    "inline": (*INLINE, "user_packages=[offered_parts]", "optimizer._target_=torch.optim.RMSprop", "~optimizer.betas"),
    "set by an experiment": ("experiment=mine",),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with a model, an optimizer and an experiment, whose modules can be imported."""
    files = {
        "model/own.yaml": "_target_: offered_parts.Net\n",
        "optimizer/plain.yaml": "_target_: offered_parts.Plain\nlr: 0.01\n",
        "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /model: mlp\noptimizer:\n"
        "  _target_: torch.optim.Adam\n  lr: 0.002\n  amsgrad: true\nactivation_checkpointing:\n  mode: none\n",
    }
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return tmp_path / "mine"


def composed(folder, *overrides):
    return compose.from_command_line(overrides, str(folder.parent / "run"), folder)


def starts(folder, *overrides):
    """A run of one step."""
    runner.run(composed(folder, *overrides))


QUICK = ("a value that other optimizers lack", "own files", "set by an experiment")
EACH = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_every_override_of_a_plan_starts(folder, case):
    given = (*TINY, *CASES[case])
    facts = trainapp.plan([*given, "batch.micro_size=4"], config_dir=folder)
    entries = [*facts["levers"], facts["best"]]
    offered = {entry["overrides"]: entry for entry in entries}
    assert any("in_backward" in text for text in offered)
    assert any("_8bit" in text or "state_dtype=8bit" in text for text in offered)
    own = compose.from_command_line(given, config_dir=folder)
    started = set()
    for text, entry in offered.items():
        words = shlex.split(text)
        config = composed(folder, *given, *words)
        if not started.issuperset(words):  # of stacks, those that have more than what has started
            runner.run(config)
            started.update(words)
        changed = ("optimizer", "precision", "memory", "activation_checkpointing", "batch", "train")
        assert any(getattr(config, name) != getattr(own, name) for name in changed), text  # it has an effect
        if entry["result"] != "other":
            assert config.optimizer.lr == own.optimizer.lr, text


def test_without_that_care_they_do_not_start():
    """Negative control: an option's name alone."""
    given = [*TINY, *CASES["a value that other optimizers lack"]]
    with pytest.raises(UserError, match=r"optimizer\.momentum: no such setting"):
        compose.from_command_line([*given, "optimizer=adamw_8bit"])
    with pytest.raises(UserError, match=r"optimizer\.momentum: no such setting"):
        compose.from_command_line(["optimizer=adamw_8bit", "optimizer.momentum=0.5"])


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_so_does_what_a_run_without_room_is_told(folder, case):
    given = (*TINY, *CASES[case], "train.ema=0.9")
    config = compose.from_command_line(given, str(folder.parent / "peak"), folder)
    peak = runner.run(config).peak_memory_bytes
    static = compose.from_command_line([*given, f"memory.limit={peak // 4}"], str(folder.parent / "run"), folder)
    with pytest.raises(UserError) as told:
        runner.run(static)
    for text in offered_in(str(told.value)):
        starts(folder, *given, *shlex.split(text))


def offered_in(message):
    """The overrides that the message of a run offers to one process."""
    offered = re.findall(r"^  +(?:[\d.]+ \w+  )?(\S.*?): (?:costs|saves)", message, re.MULTILINE)
    offered = [text for text in offered if "[NAMES]" not in text and "parallel" not in text]
    if importlib.util.find_spec("peft") is None:  # an extra
        offered = [text for text in offered if "adapter=lora" not in text]
    assert len(offered) >= 2, message
    return offered


@pytest.mark.slow
def test_so_does_what_a_run_from_the_command_line_is_told(folder, tmp_path):
    """There Hydra is in use when the overrides are tried."""
    given = (*TINY, *CASES["an argument that only the command line has"], "train.device=cpu")
    done = run_cli(*given, "memory.limit=60KiB", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    offered = offered_in(done.stderr)
    assert any("torch.optim.SGD" in text for text in offered)  # `optimizer=sgd` would keep amsgrad, which SGD refuses
    for text in offered:
        starts(folder, *given, *shlex.split(text))


def test_an_override_that_works_is_left_as_it_is():
    command = "python -m trainapp model=gpt optimizer.lr=0.1 hydra.run.dir=outputs/x"
    changes = {"precision.mode": "bf16"}
    assert startable(command, ["precision=bf16"], changes) == ["precision=bf16"]
    own = "python -m trainapp optimizer.betas=[0.9,0.95]"
    arguments = {"betas": [0.9, 0.999], "eps": 1e-8, "state_dtype": "bf16"}
    changes = {"optimizer.target": "trainapp.optim.low_precision.AdamW", "optimizer.arguments": arguments}
    assert startable(own, ["optimizer=adamw_bf16"], changes) == ["optimizer=adamw_bf16"]  # keeps the user's betas


def test_a_command_that_cannot_be_composed_again_changes_nothing():
    changes = {"precision.mode": "bf16"}
    for command in ("", "python -m trainapp model=nothing"):
        assert startable(command, ["precision=bf17"], changes) == ["precision=bf17"]


def test_another_algorithms_betas_are_not_kept():
    """NAdam's are no AdamW's."""
    own = "python -m trainapp optimizer._target_=torch.optim.{} optimizer.betas=[0.8,0.95]"
    arguments = {"betas": [0.9, 0.999], "eps": 1e-8, "state_dtype": "bf16"}
    changes = {"optimizer.target": "trainapp.optim.low_precision.AdamW", "optimizer.arguments": arguments}
    given = ["optimizer=adamw_bf16"]
    by_name = {name: startable(own.format(name), given, changes) for name in ("AdamW", "NAdam")}
    assert not any("betas" in part for part in by_name["AdamW"])
    assert "++optimizer.betas=[0.9,0.999]" in by_name["NAdam"]
