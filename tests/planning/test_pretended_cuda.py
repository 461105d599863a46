"""What is pretended of CUDA is in force, and a trace is refused where it is not."""

import json
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

from trainapp.planning.cuda.devices import DEVICES
from trainapp.planning.cuda.pretend import can_pretend

pytestmark = pytest.mark.skipif(not can_pretend(), reason="fake CUDA needs Linux on x86-64 or aarch64")

REFUSED = {
    "no_attention": "the choice of attention kernels",
    "attention_in_the_forward_alone": "the choice of attention kernels",
    "another_devices_attention": "the choice of attention kernels",
    "no_autocast": "autocast",
    "no_accumulation": "the adding up of gradients",
    "no_streams": "the allocation on streams",
    "sharded_without_foreach": "the sharding of parameters",
    "sharded_on_one_stream": "the sharding of parameters",
    "no_foreach": "the use of foreach kernels",  # last: it stays
}
OTHERS = (
    "all_in_force", "bytes_of_attention", "autocast_reaches_attention", "residual_gradients", "filled_gradients",
    "recurrent", "offloaded", "sharded_in_force", "pinned",
)  # fmt: skip


def program(*names):
    path = str(Path(__file__).with_name("pretended.py"))
    return subprocess.run(
        [sys.executable, path, *names], env=helpers.environment(), capture_output=True, text=True, timeout=300
    )


def answers(*names):
    done = program(*names)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return answers(*OTHERS, *REFUSED)


@pytest.mark.slow
def test_everything_is_in_force_for_every_device(found):
    assert found["all_in_force"] == dict.fromkeys(DEVICES)


@pytest.mark.parametrize("missing", REFUSED)
def test_what_is_not_in_force_is_named(found, missing):
    assert f"{REFUSED[missing]} is not as on a100-80gb" in found[missing]


@pytest.mark.slow
def test_a_backward_without_a_device_ends_the_process():
    """Hence a process of its own, whose end is "not traceable"."""
    done = program("no_guard")
    assert done.returncode < 0
    assert "not linked with support for cuda" in done.stderr


def test_attention_keeps_what_the_kernel_of_the_device_keeps(found):
    """The output and one fp32 per query; the plain product keeps all weights. Ampere has bf16, Volta has not."""
    fused = {name: kept for name, (kept, _) in found["bytes_of_attention"].items()}
    queries, width = 2 * 4 * 256, 64
    for name in ("a100-80gb float16", "a100-80gb bfloat16", "v100-32gb float16"):
        assert fused[name] == pytest.approx(queries * (2 * width + 4), abs=4096), name
    assert fused["a100-80gb float32"] == pytest.approx(queries * (4 * width + 4), abs=4096)
    assert fused["v100-32gb bfloat16"] > queries * 2 * 256


def test_the_backward_of_attention_needs_room_for_a_gradient_in_fp32(found):
    kept, peak = found["bytes_of_attention"]["a100-80gb bfloat16"]
    of_one = 2 * 4 * 256 * 64 * 2
    # The gradient of the output; those of q, k and v; that of q in fp32, and one number per query.
    assert peak - kept == pytest.approx(of_one + 3 * of_one + 2 * of_one + 2 * 4 * 256 * 4, abs=4096)


def test_autocast_reaches_attention(found):
    assert found["autocast_reaches_attention"] == "torch.bfloat16"


def test_gradients_are_added_up_in_place(found):
    in_place, out_of_place = found["residual_gradients"]
    assert (in_place, out_of_place) == (2, 3)


@pytest.mark.parametrize("operation", ["max", "gather", "index_select"])
def test_gradients_of_zeros_are_filled_in_place(found, operation):
    """As in a record of a GPU, whose backward of max and gather has the gradient once."""
    assert found["filled_gradients"][operation] == [1, 2]


def test_recurrent_layers_are_refused(found):
    """Without cuDNN torch takes them apart: another figure, and no error."""
    assert found["recurrent"].startswith("lstm: what cuDNN keeps")


def test_offload_moves_and_leaves_what_it_does_on_the_cpu(found):
    there, on_streams, here = found["offloaded"]
    assert len(here["moved"]) > 6
    assert there == on_streams == here


def test_shards_are_gathered_reduced_and_updated_as_on_a_device(found):
    assert found["sharded_in_force"] == [None] * 3


def test_shards_on_the_host_are_taken_to_be_pinned(found):
    assert found["pinned"] == [True, True, False]
