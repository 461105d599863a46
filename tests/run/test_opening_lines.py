"""What a run says at its start of the parameters that it trains."""

import pytest
import runs

MLP = (
    *runs.MODELS["mlp"],
    "model.depth=2",
    "train.max_steps=1",
    "checkpointing=off",
)  # 64 x 16 + 16 parameters, and 16 x 10 + 10 of the head


def lines(caplog, run_dir, *overrides):
    """What a run logs of parameters that are trained."""
    caplog.set_level("INFO", "trainapp")
    caplog.clear()
    runs.run(run_dir, *overrides)
    return [message for message in caplog.messages if "parameters are trained" in message]


@pytest.mark.parametrize(
    "overrides",
    [("model.freeze=[layers]",), ("optimizer.groups=[{match: layers, freeze: true}]",)],
    ids=["model.freeze", "optimizer.groups"],
)
def test_a_part_is_trained(tmp_path, caplog, overrides):
    assert lines(caplog, tmp_path, *MLP, *overrides) == ["170 of 1210 parameters are trained (14.05%)"]


def test_of_both_settings_together(tmp_path, caplog):
    both = ("model.freeze=[layers]", "optimizer.groups=[{match: head.bias, freeze: true}]")
    assert lines(caplog, tmp_path, *MLP, *both) == ["160 of 1210 parameters are trained (13.22%)"]


def test_nothing_is_said_where_all_are_trained(tmp_path, caplog):
    """Negative control; groups with options of their own are trained."""
    assert not lines(caplog, tmp_path, *MLP, "optimizer.groups=[{match: layers, lr: 0.01}]")


def test_nothing_is_said_of_training_in_an_evaluation(tmp_path, caplog):
    whole = tuple(o for o in MLP if o != "checkpointing=off")
    runs.run(tmp_path / "run", *whole)
    own = ("model.freeze=[layers]", "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    assert not lines(caplog, tmp_path / "eval", *whole, *own)


def test_adapters(tmp_path, caplog):
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    own = (*runs.MODELS["gpt"], "adapter=lora", "train.max_steps=1", "checkpointing=off")
    run = runs.prepare(tmp_path / "counted", *own)
    sizes = {name: p.numel() for name, p in run.state.model.named_parameters()}
    run.close()
    trained, total = sum(size for name, size in sizes.items() if "lora_" in name), sum(sizes.values())
    (line,) = lines(caplog, tmp_path / "run", *own)
    assert line == f"{trained} of {total} parameters are trained ({100 * trained / total:.2f}%)"
