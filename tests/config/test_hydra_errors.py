"""Hydra's errors as messages. tests/test_cli.py tests the mistakes themselves, as a user makes them."""

import hydra
import pytest
from helpers import run_cli
from hydra import initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException

from trainapp.config.hydra_errors import explain, fail
from trainapp.paths import CONF, PACKAGE


def test_fail_is_one_message(capsys):
    fail("first\nsecond")
    assert capsys.readouterr().err == "trainapp: first\n          second\n"


def test_an_unknown_error_of_hydra_keeps_its_words():
    assert explain(HydraException("something else")) == "something else"


def test_a_fault_has_no_message():
    assert explain(ValueError("something else")) is None
    assert explain(KeyError("Config group override")) is None


def test_an_option_without_a_name_is_named_where_it_can_be():
    error = ValueError("Config group override must be a string or a list. Got int")
    assert explain(error, ["train.seed=1", "precision=16"]).startswith("precision=16: an option is chosen by its name")
    assert explain(error, ["oom=off", "debug=null"]).startswith("debug=null: ")  # `off` is a name to Hydra, not false
    assert explain(error).startswith("an option is chosen by its name")


def test_an_error_of_the_file_system_is_about_the_run_directory_unless_a_run_met_it(tmp_path):
    assert explain(FileNotFoundError(2, "No such file or directory", "/nowhere")).startswith("/nowhere: No such file")
    # The same error with a traceback through the job function: a bug, so the traceback is kept.
    code = compile("def job():\n    open('/nowhere/file')\n", str(PACKAGE / "__main__.py"), "exec")
    names: dict = {}
    exec(code, names)
    with pytest.raises(FileNotFoundError) as caught:
        names["job"]()
    assert explain(caught.value) is None


MODULES = {
    "callable_parts": "class Factory:\n    def __call__(self, side=3):\n        pass\n\n\nmake = Factory()\n",
    "exiting_parts": "import sys\n\nsys.exit(0)\n",
}


@pytest.mark.parametrize(
    ("name", "says"),
    [("callable_parts", "callable_parts.make takes side as well"), ("exiting_parts", "an argument of exiting_parts.")],
)
def test_a_target_that_is_no_class_or_cannot_be_imported(tmp_path, name, says):
    (tmp_path / f"{name}.py").write_text(MODULES[name])
    done = run_cli("model=mlp", f"model._target_={name}.make", f"user_packages=[{name}]", "model.zzz=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("trainapp: model.zzz: no such setting; known in model: ")
    assert says in done.stderr


@pytest.mark.slow
def test_a_module_that_exits_does_not_end_the_run_in_silence(tmp_path):
    (tmp_path / "exiting_parts.py").write_text(MODULES["exiting_parts"])
    one = ("model=mlp", "data=digits", "train.device=cpu")
    done = run_cli(*one, "model._target_=exiting_parts.make", "user_packages=[exiting_parts]", cwd=tmp_path)
    assert done.returncode == 2
    said = "trainapp: model._target_=exiting_parts.make: importing exiting_parts failed: it exits with 0; "
    assert done.stderr.startswith(said)


def test_overrides_that_are_not_yaml():
    with pytest.raises(ConfigCompositionException) as caught, initialize_config_dir(str(CONF), version_base="1.3"):
        hydra.compose("train", ["model.zzz=3"])
    not_yaml = ["user_packages=[a", "model.zzz=3", "data=a: b: c", "data=2026-13-45"]
    assert explain(caught.value, not_yaml).startswith("model.zzz: no such setting; known in model: ")
    error = ValueError("Config group override must be a string or a list. Got int")
    assert explain(error, [*reversed(not_yaml), "precision=16"]).startswith("precision=16: ")
