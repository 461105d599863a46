"""The steps, in order of risk: what is likeliest to be wrong, and would cost most, comes first.

A new step is a line here, and in `steps/` a function `(table, device, folder)` that adds rows to the table.
"""

from dataclasses import dataclass

BUDGET = 580  # seconds for all steps together: ten minutes with what lies around them
CPU_TIME_FACTOR = 7  # a step may take so many times its seconds on a CPU


@dataclass(frozen=True)
class Step:
    """One subprocess. seconds: its time limit on a GPU. function: `module:name`; by default `check` of its module."""

    name: str
    about: str
    seconds: int
    function: str = ""

    @property
    def entry(self) -> str:
        """`module:name` of what it runs."""
        return self.function or f"gpu_check.steps.{self.name}:check"


STEPS = (
    Step("convolutions", "a convolution under 20 shrinking limits, cuDNN's search on and off", 25),
    Step("resnet", "model=resnet at 8 limits", 45),
    Step("tests", "tests/gpu, with and without expandable segments", 80, "gpu_check.steps.gpu_tests:check"),
    Step("recovery", "20 errors each in forward, backward and recomputation", 35),
    Step(
        "replay_deterministic",
        "a run with errors and its replay: bit for bit",
        35,
        "gpu_check.steps.replay:deterministic",
    ),
    Step("replay_default", "the same with default kernels: equal to rounding", 30, "gpu_check.steps.replay:default"),
    Step("waiting", "how often a step of a proven size waits for the device", 20),
    Step("limits", "the smallest workable limit, two jobs in one process", 40),
    Step("two_ranks", "two processes on one device over gloo, an error in each phase", 35),
    Step("one_rank", "one rank over NCCL: groups, mesh, rewrapping, background checkpoints", 40),
    Step("new_sizes", "seconds of the first steps at a new micro-batch", 20),
    Step("evaluations", "memory over 40 evaluations", 20),
    Step("faults", "device-side assert, cudaMallocAsync, fp16 overflow", 25),
    Step("speed", "steps per second against hand-written loops", 35),
    Step("planned_peaks", "the plan's peaks against those of 25 runs", 55),
)
