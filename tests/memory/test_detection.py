"""Which errors mean out of memory. Real ones are provoked where this machine can; the other messages are copied
from the threads and sources named beside them."""

import errno
import mmap
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainapp.memory.detection import broken_part, is_out_of_memory, requested_bytes

# The driver's errors end with this since torch 2.1; it mentions assertions, although none of them is one.
HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
HIP_HINT = (
    HINT.replace("CUDA kernel", "HIP kernel").replace("CUDA_LAUNCH", "AMD_SERIALIZE").replace("CUDA_DSA", "HIP_DSA")
)

MESSAGES = {
    # pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp; a plain RuntimeError before torch 1.13
    "CUDA caching allocator": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 1.27 GiB is free. Including non-PyTorch memory, this process has 22.41 GiB memory in use.",
    # EvilBT/ComfyUI_SLK_joy_caption_two#28, with CUDAMallocAsyncAllocator.cpp's ending
    "CUDA driver": "CUDA error: out of memory" + HINT,  # kijai/ComfyUI-HunyuanVideoWrapper#475
    # pytorch/pytorch, c10/cuda/driver_api.h: expandable segments; unslothai/unsloth#2401
    "CUDA driver API": "CUDA driver error: out of memory",
    "CUDA driver API, other libraries": "CUDA_ERROR_OUT_OF_MEMORY: out of memory",  # CuPy
    "Triton": "Triton Error [CUDA]: out of memory",  # triton-lang/triton, third_party/nvidia/backend/driver.c
    "pinned host memory": "cudaHostAlloc failed: out of memory",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",  # QwenLM/Qwen3#873
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    # since 9.0 (cudnn_graph.h)
    "cuDNN 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN 9 on the host": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    # pytorch/pytorch, aten/src/ATen/cudnn/Exceptions.h; raised when no algorithm's workspace fits
    "cuDNN workspace": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
    "HIP caching allocator": "HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.98 GiB",
    "HIP driver": "HIP error: out of memory" + HIP_HINT,
    "MIOpen": "miopenStatusAllocFailed",
    # intel/intel-extension-for-pytorch#629
    "XPU": "XPU out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.56 GiB total capacity; 990.00 MiB already "
    "allocated; 990.00 MiB reserved in total by PyTorch)",
    # intel/torch-xpu-ops#1598
    "XPU driver": "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "XPU kernel": "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",  # torch-xpu-ops#1170
    # pytorch/pytorch#96814
    "MPS": "MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 GB, max allowed: 32.00 GB). "
    "Tried to allocate 129.21 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for "
    "memory allocations (may cause system failure).",
    "MPS one tensor": "Invalid buffer size: 24.00 GB",
    # PKU-YuanGroup/Open-Sora-Plan#386
    "NCCL": "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
    "error:\nCuda failure 2 'out of memory'",
    # THUDM/slime#956
    "NCCL's own buffers": "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    # vllm-project/vllm#9824, pytorch/pytorch#121899
    "MIG": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a '
    "bug to PyTorch. ",
    # mxfold/mxfold2#20; Comfy-Org/Nvidia_RTX_Nodes_ComfyUI#13
    "CPU on Linux": "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
    "CPU on Windows": "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 31850496000 bytes.",
    "oneDNN": "could not create a primitive",  # uxlfoundation/oneDNN#1500
    "shared memory": "unable to mmap 8589934592 bytes from file </torch_1234_5678_0>: Cannot allocate memory (12)",
    "C++": "std::bad_alloc",
    "Gaudi": "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::67108864 (64)MB",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    assert is_out_of_memory(RuntimeError(MESSAGES[name]))


# EvilBT/ComfyUI_SLK_joy_caption_two#28: the asynchronous allocator mentions memory only at the end of its message
ASYNC_ALLOCATOR = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 15.16 GiB\n"
    "Requested               : 512.00 KiB\nDevice limit            : 15.99 GiB\nFree (according to CUDA): 0 bytes"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(ASYNC_ALLOCATOR),
        torch.OutOfMemoryError(""),
        torch.distributed.DistBackendError(MESSAGES["NCCL"]),
        getattr(torch, "AcceleratorError", RuntimeError)(MESSAGES["CUDA driver"]),  # where this version has the type
        RuntimeError(MESSAGES["CUDA caching allocator"], {"step": 3}),  # its str() is that of a tuple
        RuntimeError(MESSAGES["MPS"], "while training"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),  # os.fork, for a loader's worker
    ],
    ids=lambda e: type(e).__name__,
)
def test_types(error):
    assert is_out_of_memory(error)


def huge_tensor():
    return torch.empty(2**50, dtype=torch.uint8)


def huge_array():
    return np.empty(2**50, dtype=np.uint8)


def huge_mapping():
    return mmap.mmap(-1, 2**46)


PROVOKED = {f.__name__: f for f in (huge_tensor, huge_array, huge_mapping)}


def raised_by(function) -> BaseException:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


@pytest.mark.skipif(sys.platform != "linux", reason="other systems promise more than they have")
@pytest.mark.parametrize("name", PROVOKED)
def test_provoked_here(name):
    error = raised_by(PROVOKED[name])
    assert is_out_of_memory(error)
    if name in ("huge_tensor", "huge_array"):
        assert requested_bytes(str(error)) == 2**50


class Failing(Dataset):
    """Raises in a loader worker."""

    def __init__(self, function):
        self.function = function

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.function()


def limit_exceeded():
    from trainapp.memory.live_tensors import MemoryLimitExceeded

    raise MemoryLimitExceeded("aten.mm", 1024, 2048, 2050)


def device_error():
    raise torch.OutOfMemoryError(MESSAGES["CUDA caching allocator"])


def driver_error():
    raise RuntimeError(MESSAGES["CUDA driver"])


def through_worker(function) -> BaseException:
    batches = iter(DataLoader(Failing(function), batch_size=None, num_workers=1))
    try:
        return raised_by(lambda: next(batches))
    finally:
        batches._shutdown_workers()  # garbage collection may wait five seconds for it


@pytest.mark.skipif(sys.platform != "linux", reason="other systems promise more than they have")
@pytest.mark.parametrize(
    "function", [*PROVOKED.values(), limit_exceeded, device_error, driver_error], ids=lambda f: f.__name__
)
def test_handed_on_by_a_worker(function):
    error = through_worker(function)
    assert "DataLoader worker" in str(error)
    assert is_out_of_memory(error)


def decoy_value():
    raise ValueError("out of memory: the replay buffer holds 10 episodes")  # not "CUDA out of memory"


def decoy_source_line():
    raise RuntimeError("the labels are wrong")  # DefaultCPUAllocator: can't allocate memory


def decoy_recursion():
    return decoy_recursion()


def decoy_disk():
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


DECOYS = [decoy_value, decoy_source_line, decoy_recursion, decoy_disk]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("function", DECOYS, ids=lambda f: f.__name__)
def test_decoys_provoked_here(function):
    assert not is_out_of_memory(raised_by(function))
    assert not is_out_of_memory(through_worker(function))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("this model would run out of memory on images of 512 x 512: use 256"),
        RuntimeError("memory bank is full", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("my kernel: Failed to CUDA calloc async 608 bytes of shared memory: use a smaller tile"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),  # Triton's tile
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED"),
        RuntimeError("NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.3\nLast error:\nDuplicate GPU"),
        RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
        RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"),
        RuntimeError("CUDA error: device-side assert triggered" + HINT),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error, NCCL version 2.20.5"),
        OSError(errno.ENOSPC, "No space left on device"),
        RecursionError("maximum recursion depth exceeded"),
        KeyboardInterrupt(),
    ],
    ids=lambda e: str(e)[:40] or type(e).__name__,
)
def test_decoys(error):
    assert not is_out_of_memory(error)


def test_what_an_error_breaks_for_good():
    for name, message in MESSAGES.items():
        expected = {"CUDA driver API": "the allocator of expandable segments"}.get(name)
        expected = "the NCCL communicator" if name.startswith("NCCL") else expected
        assert broken_part(RuntimeError(message)) == expected, name
    assert broken_part(torch.distributed.DistBackendError(MESSAGES["NCCL"])) == "the NCCL communicator"
    assert broken_part(ValueError(MESSAGES["CUDA driver API"])) is None
    cause = RuntimeError("the step failed")
    cause.__cause__ = RuntimeError(MESSAGES["CUDA driver API"])
    assert broken_part(cause) == "the allocator of expandable segments"


def test_the_cause_counts_and_the_context_does_not():
    """The context is what a handler with a mistake was handling."""
    for link, expected in (("__cause__", True), ("__context__", False)):
        error = RuntimeError("the step failed")
        setattr(error, link, raised_by(device_error))
        assert is_out_of_memory(error) is expected


AMBIGUOUS = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "GET was unable to find an engine to execute this computation",  # pytorch/pytorch#108645
    "FIND was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
]


@pytest.mark.parametrize("message", AMBIGUOUS)
def test_the_devices_counters_decide_what_words_do_not(message, monkeypatch):
    # The only mock in this file: not every machine has a GPU to fill. tests/gpu has the real one.
    error = RuntimeError(message)
    assert not is_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, expected in ((40 * 2**20, True), (8 * 2**30, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 16 * 2**30))
        assert is_out_of_memory(error) is expected
    assert not is_out_of_memory(ValueError(message))


@pytest.mark.parametrize("message", AMBIGUOUS)
def test_what_the_allocator_has_refused_decides_first(message):
    """Under a limit the device has memory left."""
    error = RuntimeError(message)
    assert [is_out_of_memory(error, refused) for refused in (0, 1, 7)] == [False, True, True]
    for other in (ValueError(message), RuntimeError("mat1 and mat2 shapes"), KeyError("step")):
        assert not is_out_of_memory(other, 1)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("CUDA caching allocator", 2 * 2**30),
        ("HIP caching allocator", 512 * 2**20),
        ("MPS", int(129.21 * 2**20)),
        ("CPU on Linux", 132426121216),
        ("CPU on Windows", 31850496000),
        ("cuBLAS", None),
    ],
)
def test_requested_bytes(name, wanted):
    assert requested_bytes(MESSAGES[name]) == wanted
