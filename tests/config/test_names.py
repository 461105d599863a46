"""What a user reads about a name that does not exist. tests/test_cli.py tests the messages of whole commands."""

import pytest
from hydra.errors import HydraException

from trainapp.config import compose, names
from trainapp.errors import UserError


def refusal(*overrides):
    with pytest.raises(UserError) as refused:
        compose.from_command_line(overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.micro_sze=3", "batch.micro_sze: no such setting; did you mean 'micro_size'?"),
        ("+batch.foo=1", "batch.foo: no such setting; known here: eval_micro_size, global_size"),
        ("+foo=1", "foo: no such setting"),
        ("experment=x", "experment: no such setting; did you mean 'experiment'?"),
        ("every.never=1", "every.never: no such setting; known in every: log, eval, save"),
        ("model=resnt", "model=resnt: no such option; did you mean 'resnet'?; available: gpt, hf, mlp, resnet, vit"),
        (
            "experiment=x",
            "experiment=x: no such option; available: gpt_text; those in a folder of yours need --",
        ),
        ("precision=16", "precision=16: an option is chosen by its name; `trainapp --help` lists them"),
        ("just_a_word", "just_a_word: an argument must be a setting with a value; use SETTING=VALUE"),
        ("predict", "predict: an argument must be a setting with a value; use mode=predict"),
        ("seed=3", "seed: no such setting; here it is train.seed (`trainapp --cfg job` shows all of them)"),
        ("train.precision=bf16", "train.precision: no such setting; here it is precision "),
        ("model.lr=1", "model.lr: no such setting; here it is optimizer.lr"),
        ("optimizer=AdamW", "optimizer=AdamW: no such option; did you mean 'adamw'?"),
        (
            "schedule=StepLR",
            "schedule=StepLR: no such option; available: constant, cosine, linear, plateau, wsd; a ",
        ),
        ("optimizer.amsgrad=true", "optimizer.amsgrad: no such setting; what the YAML files do not list, such as an "),
        ("callbacks.own._target_=my.C", "callbacks.own._target_: no such setting; what the YAML files do not list, "),
        ("model.width=${nope}", "model.width: Interpolation key 'nope' not found"),
        ("optimizer=adamw_none", "optimizer=adamw_none: no such option; did you mean 'adamw"),
    ],
)
def test_a_name_that_does_not_exist(override, message):
    assert refusal(override).startswith(message)


def test_where_a_plus_is_named_it_works():
    assert "is added with +optimizer.amsgrad=true" in refusal("optimizer.amsgrad=true")
    assert compose.from_command_line(["+optimizer.amsgrad=true"]).optimizer.arguments["amsgrad"] is True


@pytest.mark.parametrize("override", ["old.name=1", "+old.name=1", "precision=old", "precision.mode=old"])
def test_an_old_name_is_an_error_that_names_the_new_one(monkeypatch, override):
    monkeypatch.setattr(names, "RENAMED", {"old.name": "is now train.seed", "precision=old": "is now precision=bf16"})
    monkeypatch.setitem(names.RENAMED, "old", "is now train")
    new = "precision=bf16" if "precision" in override else "train"
    assert f"is now {new}" in refusal(override)


def test_an_error_that_is_not_about_a_name_keeps_its_words():
    assert names.explain(HydraException("something else"), []) == "something else"
    assert names.explain(ValueError("something else"), []) is None
