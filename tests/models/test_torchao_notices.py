"""What torchao logs when it is imported stays out of a run's output; other messages do not."""

import logging

import hf_files
import pytest
from helpers import run_cli
from runs import MODELS, TINY

from trainapp import torchao_notices

pytest.importorskip("torchao")
DATA = MODELS["gpt"][6:]  # tokens of 0 to 31


CONFIG = ", ".join(f"{name}: {size}" for name, size in hf_files.SIZES.items())
BY_TARGET = (
    "model._target_=transformers.LlamaForCausalLM",
    f"model.config={{_target_: transformers.LlamaConfig, vocab_size: 32, {CONFIG}}}",
)


@pytest.mark.slow
@pytest.mark.parametrize("model", [hf_files.CAUSAL, BY_TARGET])
def test_a_run_begins_with_its_own_lines(tmp_path, model):
    pytest.importorskip("transformers")
    done = run_cli(*TINY, *model, *DATA, "train.max_steps=1", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (done.stderr, (tmp_path / "run/trainapp.log").read_text()):
        assert "global batch" in text.splitlines()[0], text
        assert "torchao" not in text
        assert "_pytree" not in text


def test_only_these_messages_are_left_out_and_only_inside(caplog):
    logger = logging.getLogger("torchao")
    with torchao_notices.left_out():
        logger.warning("Failed to load %s", "a.so")
        logger.warning("another message")
        logging.getLogger("torchao.other").warning("Failed to load b.so")
    logger.warning("Failed to load c.so")
    assert caplog.messages == ["another message", "Failed to load b.so", "Failed to load c.so"]
