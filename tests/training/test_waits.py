"""A healthy step on a GPU: where it waits for the device.

On fake CUDA tensors, in a process of their own: see `fake_cuda`.
"""

import json
import subprocess
import sys
from pathlib import Path

import fake_cuda
import helpers
import pytest
import runs

from trainapp.planning.pretend import can_pretend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_pretend(), reason="fake CUDA needs Linux on x86-64 or aarch64"),
]

MLP, GPT, RESNET = runs.MODELS["mlp"], runs.MODELS["gpt"], runs.MODELS["resnet"]
TRANSFORMED = ("user_packages=[own_transforms]", "data._target_=own_transforms.Images", "model=mlp", "model.width=16")
NEVER = {  # steps that need no answer of the device
    "gpt, whose count is a tensor": {"overrides": GPT},
    "resnet, whose buffers are copied": {"overrides": RESNET},
    "the plain loop of an optimizer": {"overrides": (*MLP, "optimizer.fused=false", "+optimizer.foreach=false")},
    "a weight average": {"overrides": (*MLP, "train.ema=0.9")},
    "samples computed with a module, which stays on the CPU": {"overrides": TRANSFORMED},
    "two ranks, whose count is a tensor": {"overrides": GPT, "ranks": 2},
}
ONCE = {  # the next step depends on whether this one counts
    "fp16, fused": {"overrides": MLP, "scaled": True},
    "fp16 on two ranks": {"overrides": (*MLP, "optimizer.fused=false"), "scaled": True, "ranks": 2},
    "skip, and the count is a tensor": {"overrides": (*GPT, "train.nonfinite=skip")},
}
OTHERS = {
    "a task that reads its loss": {"overrides": MLP, "task": "waiting"},
    "offloaded": {"function": "offloaded", "policy": "stop"},
    "offloaded, skip": {"function": "offloaded", "policy": "skip"},
}


@pytest.fixture(scope="module")
def measured():
    """`fake_cuda.measure` of every case: one process for all of them."""
    done = subprocess.run(
        [sys.executable, str(Path(fake_cuda.__file__))],
        input=json.dumps(NEVER | ONCE | OTHERS),
        env=helpers.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", NEVER)
def test_a_healthy_step_never_waits_for_the_device(measured, case):
    assert measured[case]["waits"] == []


@pytest.mark.parametrize("case", ONCE)
def test_a_step_that_may_not_count_waits_in_one_place(measured, case):
    """Further values that are read there are known by then."""
    assert len(set(measured[case]["waits"])) == 1, measured[case]["waits"]
    assert measured[case]["skipped"] == 0


def test_waits_are_counted(measured):
    """Two micro-batches, each of which reads its loss."""
    assert len(measured["a task that reads its loss"]["waits"]) == 2


def test_gradients_on_the_host_are_checked_beside_a_loss_on_the_device(measured):
    assert measured["offloaded"] == {"waits": [], "applied": True}
    assert len(set(measured["offloaded, skip"]["waits"])) == 1
