"""Hydra's errors as messages. tests/test_cli.py tests the mistakes themselves, as a user makes them."""

import pytest
from hydra.errors import HydraException

from trainapp.config.hydra_errors import explain, fail
from trainapp.paths import PACKAGE


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
