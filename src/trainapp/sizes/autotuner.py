"""cuDNN's autotuner, which follows the micro-batch sizes."""

import torch

from trainapp.sizes.micro_batches import MicroBatchSizes


class Autotuner:
    """cuDNN's autotuner, switched on only while the current sizes are settled and samples have one shape.

    With `cudnn.benchmark`, the first convolution of each shape times the algorithms, with workspaces that may not fit,
    and then empties the allocator's cache. A search for the micro-batch size would pay that for every convolution at
    every size it tries, and mistake failed workspaces for a size that does not fit. Data whose shapes vary, such as
    audio or images of mixed sizes, would pay for it for ever: cuDNN then chooses by its heuristics.

    Switching it on later is not enough: torch keeps one plan per shape, chosen by heuristics or timed, and does not
    time a shape that has a plan (`run_single_conv` in aten/src/ATen/native/cudnn/Conv_v8.cpp, read in torch 2.4;
    verified in tests/gpu). But the key of that cache includes `cudnn.deterministic`. Unsettled sizes therefore run with
    deterministic algorithms, and the first step with a settled size finds no plan.
    """

    def __init__(self) -> None:
        self._settled: set[int] = set()  # ids of sizes
        self._may_be_deterministic = True

    def allow_any(self) -> None:
        """Use any algorithms from now on: for some convolution there is no deterministic one. Shapes that have run
        before a size has settled are then not timed.
        """
        self._may_be_deterministic = False
        torch.backends.cudnn.deterministic = False

    def follow(self, sizes: MicroBatchSizes, shape_is_steady: bool) -> bool:
        """Switch the autotuner on or off for work that uses these sizes. Call before that work.

        Args:
            sizes: of the work.
            shape_is_steady: whether its latest micro-batches had one shape. In training, on all ranks.

        Returns:
            Whether it is the first work after the sizes have settled, in which algorithms are timed: this may need more
            memory than was validated. Equal on all ranks that share the sizes.
        """
        is_settled = sizes.search_has_ended and not sizes.is_unvalidated
        is_on = is_settled and shape_is_steady
        uses_heuristics = is_settled and sizes.shapes_vary
        torch.backends.cudnn.benchmark = is_on
        torch.backends.cudnn.deterministic = self._may_be_deterministic and not (is_on or uses_heuristics)

        # The autotuner times algorithms in the first settled work.
        if not is_on:
            self._settled.discard(id(sizes))
            return False
        is_first = id(sizes) not in self._settled
        self._settled.add(id(sizes))
        return is_first
