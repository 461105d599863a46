"""What a user reads about a name that does not exist. tests/test_cli.py tests the messages of whole commands."""

import pytest
from hydra.errors import HydraException

from trainapp.config import compose, mistakes
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
        ("experment=x", "experment: no such setting; did you mean 'experiment'?"),
        ("model=resnt", "model=resnt: no such option; did you mean 'resnet'?; available: gpt, hf, mlp, resnet, vit"),
        ("optimizer=AdamW", "optimizer=AdamW: no such option; did you mean 'adamw'?"),
        ("model=null", "model=null: an option is chosen by its name; choose one, or a class with model._target_=CLASS"),
        ("debug=null", "debug=null: an option is chosen by its name; for none, use 'debug=[]'"),
        ("adapter=null", "adapter=null: an option is chosen by its name; for none, use adapter=none"),
        ("oom=null", "oom=null: an option is chosen by its name; choose one of off, restart"),
        ("precision=16", "precision=16: an option is chosen by its name; `trainapp --help` lists them"),
        ("predict", "Error parsing override 'predict'"),
        ("model.width=${nope}", "model.width: Interpolation key 'nope' not found"),
    ],
)
def test_a_name_that_does_not_exist(override, message):
    assert refusal(override).startswith(message)


@pytest.mark.parametrize(
    ("group", "option", "chosen"),
    [
        ("callbacks", "predictions", lambda config: config.callbacks),
        ("tracker", "csv", lambda config: config.tracker),
        ("adapter", "lora", lambda config: config.adapter.kind != "none"),
    ],
)
def test_what_is_named_instead_of_null_undoes_the_choice_of_an_experiment(tmp_path, group, option, chosen):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "port.yaml").write_text(f"# @package _global_\ndefaults:\n  - override /{group}: {option}\n")
    command = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=port", "model=gpt", "data=synthetic_tokens")
    assert chosen(compose.from_command_line(command))
    instead = refusal(*command, f"{group}=null").rpartition(" use ")[2].strip("'")
    assert not chosen(compose.from_command_line([*command, instead]))


def test_where_a_plus_is_named_it_works():
    assert "use +optimizer.amsgrad=VALUE" in refusal("optimizer.amsgrad=true")
    assert compose.from_command_line(["+optimizer.amsgrad=true"]).optimizer.arguments["amsgrad"] is True


@pytest.mark.parametrize("override", ["old.name=1", "+old.name=1", "precision=old", "precision.mode=old"])
def test_an_old_name_is_an_error_that_names_the_new_one(monkeypatch, override):
    own = {"old.name": "is now train.seed", "precision=old": "is now precision=bf16", "old": "is now train"}
    monkeypatch.setattr(mistakes, "RENAMED", own)
    new = "precision=bf16" if "precision" in override else "train"
    assert f"is now {new}" in refusal(override)


def test_an_error_that_is_not_about_a_name_keeps_its_words():
    assert mistakes.explain(HydraException("something else"), []) == "something else"
    assert mistakes.explain(ValueError("something else"), []) is None


def test_a_list_in_place_of_a_group_names_the_defaults_list(tmp_path):
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment/mine.yaml"
    file.write_text("# @package _global_\ntracker: []\n")
    with pytest.raises(UserError) as raised:
        compose.from_command_line(["experiment=mine"], config_dir=tmp_path)
    text = str(raised.value)
    assert text.startswith("experiment/mine.yaml: a list stands where a section is, as in `tracker: []`; ")
    assert "`- override /tracker: []` for none" in text
    file.write_text("# @package _global_\ndefaults:\n  - override /tracker: []\n")
    assert compose.from_command_line(["experiment=mine"], config_dir=tmp_path).tracker == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {width: ???}\n",
            "line 2, column 16: not valid YAML: expected the node content, but found '?'; inside",
        ),
        ("train: {seed: 1\n", "line 3, column 1: not valid YAML: expected ',' or '}'"),
        ("train: {seed: 1, seed: 2}\n", "not valid YAML: found duplicate key seed"),
    ],
)
def test_a_file_that_is_not_yaml(tmp_path, text, message):
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment/mine.yaml"
    file.write_text(f"# @package _global_\n{text}")
    with pytest.raises(UserError) as raised:
        compose.from_command_line(["experiment=mine"], config_dir=tmp_path)
    assert str(raised.value).startswith(str(file))
    assert message in str(raised.value)


def test_an_empty_mapping_that_removes_nothing_is_refused():
    """Hydra merges it with the entries that are there."""
    callback = "+callbacks.norms={_target_: own_hooks.Records}"
    with pytest.raises(UserError, match=r"callbacks=\{\}: removes nothing.* write ~callbacks\.norms$"):
        compose.from_command_line([callback, "callbacks={}"])
    assert "norms" not in compose.from_command_line([callback, "~callbacks.norms"]).callbacks


def test_a_section_that_is_missing_is_not_its_own_suggestion():
    with pytest.raises(UserError, match="callbacks: no such setting; `trainapp --cfg job` shows all"):
        compose.from_command_line(["callbacks={}"])
