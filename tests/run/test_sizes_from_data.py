"""The data's sizes reach a model whose sizes stand in a nested configuration; one that the user has set is compared."""

import logging
import os

import pytest
import runs
from helpers import ROOT, train

from trainapp.checkpoint.train_state import TrainState

TOKENS = ("data=synthetic_tokens", "data.vocab_size=98", "data.context_length=16", "data.size=64", "data.val_size=16")
IMAGES = ("data=digits", "user_packages=[own_nested]")
PART = "{_target_: own_nested.Part}"


def nano(config="", *others):
    """The settings of a GPT with these entries in its nested configuration."""
    node = f"{{_target_: own_nested.GPTConfig, n_embd: 4{config}}}"
    return (*runs.own_model("own_nested.GPT"), f"+model.config={node}", "user_packages=[own_nested]", *TOKENS, *others)


def sized(*others):
    return (*runs.own_model("own_nested.Sized"), *IMAGES, *others)


def opened(tmp_path, *settings):
    """The state of a run with these settings, before its first step."""
    return runs.closed(tmp_path, *settings).state


@pytest.mark.slow
def test_the_command_line(tmp_path):
    """Of 98 tokens in a vocabulary of 4 numbers each: 804 parameters instead of 402,456."""
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/helpers")])}
    done = train(tmp_path / "run", *runs.TINY, *nano(), "train.max_steps=1", "tracker=[]", env=env)
    assert "GPT with 804 parameters" in done.stderr + done.stdout


def test_a_nested_configuration_and_the_head_that_the_model_builds(tmp_path):
    head = "+model.head={_target_: own_nested.Head, _partial_: true}"
    state = opened(tmp_path, *nano("", head))
    assert state.model.wte.weight.shape == (98, 4)
    assert state.model.head.weight.shape == (98, 4)
    assert state.filled == {"model.config.vocab_size": 98, "model.head.vocab_size": 98}


def test_parts_in_a_list_beside_the_models_own_size(tmp_path):
    state = opened(tmp_path, *sized(f"+model.parts=[{PART}, {{deep: {PART}}}]"))
    assert state.model.parts[0].num_classes == state.model.parts[1]["deep"].num_classes == 10
    assert state.filled == {
        "model.num_classes": 10,
        "model.image_shape": (1, 8, 8),
        "model.parts.0.num_classes": 10,
        "model.parts.1.deep.num_classes": 10,
    }


def test_a_configuration_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
    config = "+model.config={_target_: transformers.GPT2Config, n_layer: 1, n_embd: 8, n_head: 2}"
    state = opened(tmp_path, *runs.own_model("transformers.GPT2LMHeadModel"), config, *TOKENS)
    assert state.model.transformer.wte.weight.shape == (98, 8)
    assert state.model.config.n_positions == 1024  # is named like no key of the spec
    assert state.filled == {"model.config.vocab_size": 98}


# --- sizes that the user has set


def test_a_padded_vocabulary_is_named_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert opened(tmp_path, *nano(", vocab_size: 128")).model.wte.weight.shape == (128, 4)
    (record,) = [record for record in caplog.records if "vocab_size" in record.message]
    assert record.levelno == logging.INFO
    assert record.message.startswith("model.config.vocab_size=128 is larger than the data's vocab_size=98")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            nano(", vocab_size: 64"),
            "model.config.vocab_size=64: the data has vocab_size=98, so a target of 97 would be",
        ),
        (
            sized("+model.num_classes=4"),
            "model.num_classes=4: the data has num_classes=10, so a target of 9 would be",
        ),
    ],
)
def test_too_few_outputs_for_a_built_in_loss_are_refused(tmp_path, settings, text):
    """It would fail at the first such target; on a GPU with an error that names nothing."""
    assert text in runs.refusal(tmp_path, *settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            ("task=own_nested.mean_logits", "+model.num_classes=4"),
            "model.num_classes=4 is smaller than the data's ",
        ),
        (("+model.parts=[{_target_: own_nested.Part, num_classes: 4}]",), "model.parts.0.num_classes=4 is smaller"),
        (("+model.image_shape=[3,8,8]",), "model.image_shape=[3, 8, 8] differs from the data's image_shape=(1, 8, 8)"),
    ],
)
def test_other_sizes_may_be_meant_and_are_named(tmp_path, caplog, settings, text):
    opened(tmp_path, *sized(*settings))
    (record,) = [
        record for record in caplog.records if record.levelno == logging.WARNING and "the data's" in record.message
    ]
    assert record.message.startswith(text)


@pytest.mark.parametrize(
    "settings",
    [
        nano(", vocab_size: 98"),
        sized("+model.image_shape=[1,8,8]"),
        sized("+model.parts=[{_target_: own_nested.Part, num_classes: 0}]"),  # a part without its last layer
        (*runs.MODELS["gpt"], "model.context_length=64"),  # longer than the data's sequences
    ],
)
def test_what_agrees_with_the_data_is_not_named(tmp_path, caplog, settings):
    caplog.set_level(logging.INFO)
    opened(tmp_path, *settings)
    assert not [record for record in caplog.records if "the data's" in record.message]


# --- models that are built again


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    runs.run(folder, *nano(), "train.max_steps=1")
    return folder


def test_a_runs_settings_build_the_same_model_again(trained, tmp_path):
    resumed = ("user_packages=[own_nested]", f"checkpointing.resume={trained}")
    assert runs.run(tmp_path / "eval", "mode=eval", *resumed).objective > 0
    runs.run(tmp_path / "export", "mode=export", *resumed)
    assert len(runs.infer("predict", tmp_path, trained, resumed[0], "data.size=8")) == 16
    continued = runs.run(tmp_path / "continued", *nano(), f"checkpointing.resume={trained}", "train.max_steps=2")
    assert continued.steps == 2


@pytest.mark.parametrize("mode", ["predict", "eval", "export", "train"])
def test_a_model_does_not_follow_other_data_than_its_own(trained, tmp_path, mode):
    """With another vocabulary, tokens have another meaning. The model's own sizes and nested ones are alike."""
    settings = (f"mode={mode}", f"checkpointing.resume={trained}", "user_packages=[own_nested]", "data.vocab_size=120")
    settings = (*nano(), "data.vocab_size=120", *settings[1:2]) if mode == "train" else settings
    message = runs.refusal(tmp_path, *settings)
    assert "model.wte.weight (98, 4) instead of (120, 4)" in message
    assert "of the sizes that the data determine, model.config.vocab_size is 120 (was 98)" in message


def test_a_run_of_a_version_that_left_nested_targets_at_their_defaults(tmp_path, monkeypatch):
    old = nano(", vocab_size: 128", "train.max_steps=1")
    with monkeypatch.context() as patched:
        patched.setattr(TrainState, "values", without_filled(TrainState.values))
        runs.run(tmp_path / "old", *old)
    resumed = (f"checkpointing.resume={tmp_path / 'old'}", "train.max_steps=2")
    message = runs.refusal(tmp_path / "new", *nano(), *resumed)
    assert "model.wte.weight (128, 4) instead of (98, 4)" in message
    assert "the data determine model.config.vocab_size=98, but it was saved by a version that left nested" in message
    runs.run(tmp_path / "new", *nano(", vocab_size: 128"), *resumed)


def without_filled(values):
    def saved(self, ranks):
        return {name: value for name, value in values(self, ranks).items() if name != "filled"}

    return saved


def test_a_plan_is_of_the_model_with_the_datas_sizes(tmp_path):
    """402,456 parameters with gradients and two moments would take 6.1 MiB."""
    assert runs.traced_peak(runs.configure(tmp_path, *nano()), 4) < 2**20
    assert runs.traced_peak(runs.configure(tmp_path, *nano(", vocab_size: 50304")), 4) > 6 * 2**20
