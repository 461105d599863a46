"""Where no smaller micro-batch can help, the run says so at once: it does not halve the batch down to one sample."""

import logging

import pytest
import runs
from harness import Recorded

from trainapp.errors import TrainingStopped

from .conftest import peak_of, tiny

# 1.1 million parameters, nearly all in one matrix.
WIDE = (
    *runs.own_model("own_models.Wide"),
    "+model.width=1024",
    "data=digits",
    "user_packages=[own_models]",
    "train.ema=null",
)
PLAIN = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false")
MATRIX = 4 * 1024 * 1024
PARAMETERS = MATRIX + 4 * (64 * 1024 + 1024 + 1024 + 1024 * 10 + 10)


def ended(run_dir, caplog, *overrides: str, limit: int, share: int = 256) -> tuple[str, list[str]]:
    """The last message of a run under a limit, and the lines of its retries."""
    changes = {"batch.micro_size": "auto", "batch.global_size": share, "memory.limit": limit}
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(run_dir, *WIDE, *overrides, changes=changes))
    return str(caught.value), [text for text in caplog.messages if text.startswith("out of memory")]


def test_what_is_there_before_any_sample(tmp_path, caplog):
    """AdamW's state, at the start of the step."""
    message, retries = ended(tmp_path, caplog, limit=PARAMETERS * 5 // 2)
    assert retries == []
    first, *table = message.splitlines()
    assert first == (
        "out of memory in optimizer state with micro-batch 256: what is in memory before any sample exceeds the limit, "
        "so no other size can help."
    )
    assert any(line.startswith("optimizer state  ") for line in table)
    advice = message.partition("Settings that save memory, best first")[2].splitlines()[1]
    assert advice.startswith("  optimizer=sgd optimizer.momentum=0 optimizer.nesterov=false: saves up to 8.6 MiB (")
    assert "optimizer=adamw_4bit" not in message  # its step's temporaries are as large here


def test_a_commit_that_asks_for_the_same(tmp_path, caplog):
    """SGD's dampened momentum is first made there."""
    momentum = ("optimizer=sgd", "optimizer.nesterov=false", "+optimizer.dampening=0.1")
    message, retries = ended(tmp_path, caplog, *momentum, limit=PARAMETERS * 3 - 20_000, share=16)
    assert len(retries) == 1
    first, *rest = message.splitlines()
    assert first == "out of memory in commit with micro-batch 8: what it asks for does not depend on the micro-batch."
    assert any(line.strip().startswith("optimizer=sgd optimizer.momentum=0 ") for line in rest)
    # On the old code, also what saves activations, of which a commit has none, or the gradients of a whole step.
    assert not any(line.strip().startswith(("precision=bf16:", "optimizer.in_backward")) for line in rest)


@pytest.mark.parametrize(
    ("kernel", "advice"),
    [
        (
            "optimizer.fused=false",
            "Adam makes temporary copies of parameters in its step; with optimizer.fused=true",
        ),
        ("+optimizer.foreach=true", "with optimizer.fused=true or +optimizer.foreach=false (slower) it needs fewer"),
    ],
)
def test_a_commit_without_a_fused_kernel_advises_one(tmp_path, caplog, kernel, advice):
    adam = ("optimizer._target_=torch.optim.Adam", "~optimizer.betas", "~optimizer.eps", "optimizer.weight_decay=null")
    kernels = dict.fromkeys(("optimizer.fused=false", kernel))
    message, _ = ended(tmp_path, caplog, *adam, *kernels, limit=PARAMETERS * 9 // 2, share=1)
    assert message.startswith("out of memory in commit with micro-batch ")
    assert advice in message


def test_of_a_whole_batch_only_what_its_forward_needs_is_advised(tmp_path, caplog):
    """Gradients, which an update in the backward spares, are none of it."""
    whole = ("task=own_tasks.Whole", "user_packages=[own_models,own_tasks]")
    message, retries = ended(tmp_path, caplog, *PLAIN, *whole, limit=PARAMETERS * 3 // 2, share=1024)
    assert retries == []
    assert "whole_batch=True" in message
    assert "  precision=bf16_pure optimizer=adamw_bf16: saves" in message
    assert "  precision=bf16: saves" not in message  # copies of the weights take as much
    assert "optimizer.in_backward" not in message
    assert "optimizer=adamw_8bit" not in message  # there is no state


@pytest.mark.parametrize("grow", ["true", "false"])
def test_a_split_step_that_needs_a_second_gradient(tmp_path, caplog, grow):
    """The whole batch does not fit for its activations; split, its gradients stay while others are computed."""
    limit = 2 * PARAMETERS + MATRIX - 100_000
    message, retries = ended(tmp_path, caplog, *PLAIN, f"oom.grow={grow}", limit=limit, share=512)
    assert len(retries) <= 4
    assert retries[-1].endswith("-> 1, retrying the step (the request did not shrink with fewer samples)")
    first = message.splitlines()[0]
    assert first.startswith(
        "out of memory in backward with micro-batch 1: what it asks for does not depend on the micro-batch. A step of "
        "several micro-batches keeps the gradients of the earlier ones (4.3 MiB) beside those"
    )
    assert "batch.global_size" in first


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 8])
def test_what_a_smaller_micro_batch_solves_is_not_given_up(tmp_path, size):
    """The same model, under a limit that a split step just fits: though most of it does not depend on the size."""
    overrides = (*WIDE, *PLAIN, "batch.global_size=512", "train.max_steps=2")
    limit = peak_of(tmp_path / "peak", overrides, size)
    changes = {"batch.micro_size": "auto", "memory.limit": limit, "oom.grow": True}
    recorded = Recorded(tiny(tmp_path / "run", *overrides, changes=changes))
    assert recorded.failures
    assert recorded.run.state.progress.step == 2
    assert recorded.run.memory.peak <= limit
