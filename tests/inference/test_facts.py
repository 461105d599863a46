"""What decides whether the lines of an interrupted process are continued."""

from types import SimpleNamespace

import pytest

from trainapp.checkpoint.manifest import MANIFEST
from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.inference import batches
from trainapp.inference.batches import facts_of, output_path
from trainapp.inference.data_facts import _files


def test_other_arguments_of_a_task(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "resolve", lambda checkpoint: tmp_path)
    (tmp_path / MANIFEST).write_text("{}")

    def facts(temperature):
        task = f"task={{_target_: contrastive, temperature: {temperature}}}"
        given = ["mode=predict", f"checkpointing.resume={tmp_path}", task]
        return facts_of(compose.from_command_line(given, str(tmp_path / "run")))

    assert facts(0.3) == facts(0.3)
    assert facts(0.3) != facts(0.5)


def test_the_home_of_an_unknown_user():
    assert not list(_files({"text": "~no-such-user: hello"}))
    run = SimpleNamespace(config=SimpleNamespace(mode="predict", run_dir="."))
    with pytest.raises(
        UserError, match=r"^predict\.output=~no-such-user/p\.jsonl: there is no such user; name another file$"
    ):
        output_path(run, "~no-such-user/p.jsonl", "predictions.jsonl")
