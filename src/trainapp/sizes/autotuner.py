"""cuDNN's autotuner, enabled only while the micro-batch size is settled.

With `cudnn.benchmark`, the first convolution of each shape times the algorithms, with workspaces that may not fit, and
then empties the allocator's cache. A search for the micro-batch size would pay that for every convolution at every size
that it tries, and take the failed workspaces for a size that does not fit.

Switching it on later is not enough: torch keeps one plan per shape, chosen by heuristics or timed, and does not time a
shape that has a plan (`run_single_conv` in aten/src/ATen/native/cudnn/Conv_v8.cpp, read in torch 2.4; tests/gpu tries
it). But the key of that cache has `cudnn.deterministic` in it. So sizes that are not settled run with deterministic
algorithms, and the first step with a settled one finds no plan.
"""

import torch

from trainapp.sizes.micro_batches import MicroBatchSizes


class Autotuner:
    """Switches cuDNN's autotuner on while the sizes at work are settled."""

    def __init__(self) -> None:
        self._is_on: bool | None = None  # None: not set yet
        self._settled: set[int] = set()  # ids of sizes

    def follow(self, sizes: MicroBatchSizes) -> bool:
        """Call before work that is cut by these sizes. Returns whether it is the first since they are settled, in which
        algorithms are timed: that may need memory which was not validated. Equal on all ranks that share the sizes.
        """
        is_settled = sizes.search_has_ended and not sizes.is_unvalidated
        if is_settled is not self._is_on:
            torch.backends.cudnn.benchmark = self._is_on = is_settled
            torch.backends.cudnn.deterministic = not is_settled
        is_first = is_settled and id(sizes) not in self._settled
        (self._settled.add if is_settled else self._settled.discard)(id(sizes))
        return is_first


def autotuner_for(device: torch.device, deterministic: bool) -> Autotuner | None:
    """None without CUDA, and with `train.deterministic`: the fastest algorithm may differ from run to run."""
    return Autotuner() if device.type == "cuda" and not deterministic else None
