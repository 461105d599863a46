"""How long steps take on a GPU that is not here: by data sheets, for comparing configurations."""

from collections import Counter

import pytest
import runs
import torch

from trainapp.config import compose
from trainapp.planning.cuda.devices import DEVICES, MIB, find
from trainapp.planning.cuda.speeds import KERNEL, OF_ARITHMETIC, OF_MEMORY, OPERATION, GpuSpeeds, rates_of
from trainapp.planning.operation import FUNCTION, HOST, LINK, MATMUL, Operation
from trainapp.planning.step_work import MicroBatchWork, Work

RATES = rates_of(DEVICES["a100-80gb"])


def speeds(mode="bf16"):
    return GpuSpeeds(RATES, compose.from_command_line([*runs.TINY, f"precision={mode}"]))


def operation(name="mm", kind=MATMUL, dtype=torch.bfloat16, work=0, moved=0, place="cuda"):
    return Operation(name, name, kind, dtype, work, moved, moved, True, False, place, None)


def test_every_device_of_the_table_has_rates():
    for device in DEVICES.values():
        rates = rates_of(device)
        assert 0 < rates.single <= rates.tf32 <= rates.half
        assert rates.link < rates.memory < rates.single


def test_what_is_older_than_tf32_computes_without_it():
    assert rates_of(DEVICES["v100-16gb"]).tf32 == rates_of(DEVICES["v100-16gb"]).single
    assert rates_of(DEVICES["a100-40gb"]).tf32 == 156e12


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        (f"{80 * 1024 * MIB}@8.0", "a100-80gb"),
        (f"{40 * 1024 * MIB}@8.0", "a100-40gb"),
        ("24GiB@12.0", "h100-80gb"),  # of the newest that are known
        (f"{24 * 1024 * MIB}@8.9 NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        (f"{24 * 1024 * MIB}@8.6 NVIDIA A10", "a10-24gb"),
    ],
)
def test_other_devices_have_the_rates_of_a_like_one(name, alike):
    assert rates_of(find(name)) == rates_of(DEVICES[alike])


def test_the_roofline_counts():
    product = operation(work=10**13, moved=10**6)
    assert speeds().busy(product) == pytest.approx(10**13 / (OF_ARITHMETIC * 312e12))
    copy = operation("add", work=0, moved=10**9)
    assert speeds().busy(copy) == pytest.approx(10**9 / (OF_MEMORY * 2039e9))
    assert speeds().busy(operation("gelu", FUNCTION, work=10**9, moved=10**9)) == speeds().busy(copy)
    assert speeds().busy(operation(moved=8)) == KERNEL
    assert speeds().busy(operation("empty_like", moved=10**9)) == 0


def test_tf32_is_in_the_configuration_and_not_in_the_tensors():
    product = operation(dtype=torch.float32, work=10**13)
    assert speeds("tf32").busy(product) * 8 == pytest.approx(speeds("fp32").busy(product))
    assert speeds("bf16").busy(product) == speeds("fp32").busy(product)


def test_copies_and_python_run_beside_the_gpu_and_the_longest_counts():
    large, copied = operation(work=10**13), operation("copy_", moved=2 * 24 * 10**9, place=LINK)
    one = MicroBatchWork(operations=Counter({large: 1}))
    alone = Work([one]).seconds(speeds())
    assert alone == speeds().busy(large)
    assert Work([MicroBatchWork(operations=Counter({large: 1, copied: 1}))]).seconds(speeds()) == pytest.approx(1.0)
    many = MicroBatchWork(operations=Counter({operation(moved=8): 1000}))
    assert Work([many]).seconds(speeds()) == pytest.approx(1000 * OPERATION)


def test_the_step_of_an_optimizer_on_the_host_waits_for_it():
    large = MicroBatchWork(operations=Counter({operation(work=10**13): 1}))
    on_host = operation("_fused_adamw_", moved=20 * 10**9, place=HOST)
    copied = operation("copy_", moved=2 * 24 * 10**9, place=LINK)
    step = Work([large], per_step=Counter({on_host: 1, copied: 1}))
    assert step.seconds(speeds()) == pytest.approx(2.0 + Work([large]).seconds(speeds()))
