"""`debug=profile`: what a few steps spend their time on, by torch's profiler."""

import logging
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from trainapp.config.validation import NonNegativeInt, PositiveInt
from trainapp.hooks.callbacks import View

log = logging.getLogger(__name__)


class Profile:
    """Profiles `steps` steps after the first `wait`, whose sizes are not proven yet and whose kernels are not chosen.

    Leaves profile/rank_N.json, a trace for chrome://tracing or ui.perfetto.dev; rank 0 also prints the `top`
    operators and how long the steps have waited for their batches, and leaves that in profile/summary.txt.
    """

    def __init__(self, wait: NonNegativeInt = 4, steps: PositiveInt = 5, top: PositiveInt = 15):
        self.wait, self.steps, self.top = wait, steps, top
        self._profiler: Any = None
        self._seen = self._profiled = 0
        self._started = self._waited = 0.0
        self._ended = False

    def after_step(self, view: View) -> None:
        self._seen += 1
        if self._profiler is not None:
            self._profiled += 1
            if self._profiled == self.steps:
                self._finish(view)
        elif self._seen >= self.wait and not self._ended:
            activities = [ProfilerActivity.CPU]
            if next(view.model.parameters()).device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()
            self._started, self._waited = time.monotonic(), view.waited

    def on_end(self, view: View) -> None:
        """The run may have ended sooner."""
        if self._profiler is not None and self._profiled:
            self._finish(view)
        elif not self._ended:
            log.warning("callbacks.profile: the run has ended after %d steps, before one was profiled", self._seen)

    def close(self) -> None:
        """After an error: an open profiler would profile the next run of the process."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def _finish(self, view: View) -> None:
        seconds, waited = time.monotonic() - self._started, view.waited - self._waited
        profiler, self._profiler, self._ended = self._profiler, None, True
        profiler.stop()
        folder = view.run_dir / "profile"
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank_{view.rank}.json"))
        if not view.is_rank_zero:
            return
        on_device = ProfilerActivity.CUDA in profiler.activities
        key = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=self.top, max_name_column_width=60)
        text = (
            f"{self._profiled} steps up to step {view.step} took {seconds:.3f} s, of which {waited:.3f} s "
            f"({100 * waited / max(seconds, 1e-9):.0f}%) waiting for batches\n{table}\n"
        )
        (folder / "summary.txt").write_text(text)
        print(text, flush=True)
        view.tracker.note(f"the profile of {self._profiled} steps is in {folder}")
