"""All micro-batch sizes of a run, and their record: in checkpoints, in result.json and for restarted workers."""

import contextlib
import sys
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.files import atomic_write, json_object, strict_json
from trainapp.parallel.ranks import Ranks
from trainapp.sizes.autotuner import Autotuner
from trainapp.sizes.micro_batches import MicroBatchSizes

RESTART = "restart.json"  # in the run directory: written by a worker that ran out of memory, for the restarted ones
EVALUATION = "eval_micro"


@dataclass
class Sizes:
    """Micro-batch sizes, in samples per forward on one rank. `train`: the sizes of the update that is selected."""

    by_update: dict[str, MicroBatchSizes]  # by the update's name, "" for a step's only update
    evaluation: MicroBatchSizes
    autotuner: Autotuner | None  # None without CUDA, and where results must be deterministic
    oom_restarts: int  # recoveries from out-of-memory errors since the run began, over all its processes
    recoveries: int  # these, and those from micro-batches with too few samples for the model
    shape_is_steady: bool = False  # whether the latest training micro-batches had one shape, on every rank its own

    def __post_init__(self) -> None:
        self.train = next(iter(self.by_update.values()))

    def select_update(self, update: str) -> None:
        """Select the update whose sizes are in `train`."""
        self.train = self.by_update[update]

    def micro_schedule(self) -> dict[Any, Any]:
        """Return sizes for `batch.micro_schedule` that replay the run: by attempt; with several updates, one schedule
        per name of those that were made.
        """
        schedules = {name: sizes.schedule.replay() for name, sizes in self.by_update.items()}
        if "" in schedules:
            return schedules[""]
        return {name: schedule for name, schedule in schedules.items() if schedule}

    def usual_sizes(self, attempts: int) -> dict[str, int]:
        """Return the size with which most steps of the run were made, by update. attempts: all steps, also skipped."""
        return {name: sizes.schedule.usual_size(attempts, default=sizes.size) for name, sizes in self.by_update.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return primitives only, for a checkpoint."""
        state: dict[str, Any] = {}
        for key, sizes in self._by_key().items():
            state[key] = sizes.state_dict()
        state["used"] = {name: sizes.schedule.recorded for name, sizes in self.by_update.items()}
        return state | self._counts()

    def after_failure(self, failing: MicroBatchSizes) -> dict[str, Any]:
        """Return what restarted workers need: the failing sizes, earlier failures, which may be in no checkpoint yet,
        and the counts of recoveries.
        """
        restart: dict[str, Any] = {}
        for key, sizes in self._by_key().items():
            searches = sizes.searches.values()
            has_failed_before = any(search.smallest_excluded is not None for search in searches)
            if sizes is failing or has_failed_before:
                restart[key] = sizes.state_dict()
        return restart | self._counts()

    def beginning_with(self, size: int, failing: MicroBatchSizes) -> dict[str, Any]:
        """Return a record like `state_dict` in which the search of the failing sizes begins anew, with a small size.

        Args:
            size: the first one.
            failing: the sizes.
        """
        state = self.state_dict()
        for key, sizes in self._by_key().items():
            if sizes is failing:
                state[key] = MicroBatchSizes(sys.maxsize, first=size).state_dict()
        return state

    def _counts(self) -> dict[str, int]:
        return {"oom_restarts": self.oom_restarts, "recoveries": self.recoveries}

    def _by_key(self) -> dict[str, MicroBatchSizes]:
        by_key = {key_of(name): sizes for name, sizes in self.by_update.items()}
        by_key[EVALUATION] = self.evaluation
        return by_key


def leave_for_restart(run_dir: Path, restart: dict[str, Any]) -> None:
    """Write restart.json. Raises OSError if it cannot be written.

    Args:
        run_dir: of the run.
        restart: sizes and counts, as a `Sizes` returns them, and what else the restarted workers need.
    """
    with atomic_write(run_dir / RESTART) as file:
        file.write(strict_json(restart))


def take_restart(run_dir: Path, has_restarted: bool, ranks: Ranks) -> dict[str, Any]:
    """Read and remove restart.json. Collective: rank 0 reads for all.

    Args:
        run_dir: of the run.
        has_restarted: False only removes the file of an earlier start.
        ranks: all ranks of the run.

    Returns:
        What the file holds; empty without one.
    """
    restart: dict[str, Any] = {}
    if ranks.is_rank_zero:
        restart = json_object(run_dir / RESTART)
        with contextlib.suppress(OSError):
            (run_dir / RESTART).unlink(missing_ok=True)
    restart = ranks.all_gather_object(restart)[0]
    return restart if has_restarted else {}


def configured_size(config: Config, share: int) -> int | None:
    """Return the configured micro-batch size for training, at most this rank's share; None if it is to be found."""
    if config.accumulation.steps != "auto":
        return -(-share // config.accumulation.steps)
    if isinstance(config.batch.micro_size, int):
        return min(config.batch.micro_size, share)
    return None


def key_of(update: str) -> str:
    """Return the key of an update's sizes in a file. A step's only update has no name."""
    return f"micro.{update}" if update else "micro"


def sizes_text(sizes: MicroBatchSizes) -> str:
    """Return the size in words; if shapes of data differ, one size per shape, smallest samples first."""
    distinct_sizes = {search.size for search in sizes.searches.values()}
    if len(distinct_sizes) < 2:
        return str(sizes.size)

    by_shape = sorted((bucket, search.size) for bucket, search in sizes.searches.items())
    texts = []
    for size, shapes in groupby(by_shape, key=itemgetter(1)):  # neighbouring shapes with one size are one range
        buckets = [bucket for bucket, _ in shapes]
        texts.append(f"{size}{shape_suffix(sizes, buckets[-1])}")
    return ", ".join(texts)


def next_size_text(sizes: MicroBatchSizes, bucket: int) -> str:
    """Return what the next step tries, after a clean one: see `SizeSearch.record_success`."""
    search = sizes.searches[bucket]
    size = f"{search.size}{shape_suffix(sizes, bucket)}"
    if search.failures_in_a_row:
        return f"runs micro-batch {size}: a larger one makes the device's allocator free its cache in every step"
    return f"tries a larger micro-batch: {size}"


def shape_suffix(sizes: MicroBatchSizes, bucket: int) -> str:
    """Return a suffix that names the shape, if there are several."""
    if len(sizes.searches) < 2:
        return ""
    return f" for up to {bucket} elements per sample"
