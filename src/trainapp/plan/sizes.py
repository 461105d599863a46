"""The peak of one configuration at any micro-batch size, and the largest sizes that fit."""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from trainapp.config import micro_schedule
from trainapp.config.schema import Config
from trainapp.data.stream import at_most, is_stream
from trainapp.errors import UserError
from trainapp.plan.bounds import Bounds, bounds, joined, ways_beside
from trainapp.plan.certainty import certainty_of
from trainapp.plan.largest import largest_that_fits
from trainapp.plan.place import Place
from trainapp.plan.ranks import highest_ranks, simulated, world_of
from trainapp.plan.real_steps import RealSteps
from trainapp.plan.recorder import PHASES, Peak
from trainapp.plan.traced_part import planned_config
from trainapp.plan.traced_run import ON_CPU, Trace, trace
from trainapp.plan.ways import FIRST, Way
from trainapp.train.components import Components, choose_device
from trainapp.train.losses import needs_whole_batch
from trainapp.train.whole_batch import require_uncut

Facts = dict[str, Any]


class Largest(NamedTuple):
    """The largest size that fits, 0 if none does. peaks: by size, of the way that needs the most."""

    size: int
    peaks: dict[int, int]


class Planner:
    """Traces one configuration at the sizes that the plan needs, each at most once."""

    def __init__(self, config: Config, components: Components, steps: RealSteps | None = None):
        """steps: run for real in place of traces."""
        self.config, self.components, self._steps = config, components, steps
        self.counts_work = False  # whether traces also count operations
        self.traces = 0
        self.place: Place = ON_CPU
        self.limit = self.place.limit(config)
        self.world = world_of(config)
        is_sharded = config.parallel.strategy == "fsdp" and self.world > 1
        self.shards = self.world // config.parallel.fsdp.replicas if is_sharded else 1
        self.device = choose_device(config.train.device)
        self.share = -(-at_most(config.batch.global_size, components.train_data) // self.world)
        evaluated = components.eval_data.values() if config.every.eval is not None else ()
        # Of the largest set: none has a larger micro-batch. A stream may have as many samples as fit.
        self.all_eval_samples = max(
            (2 * self.share * self.world if is_stream(data) else len(data) for data in evaluated), default=0
        )
        self.eval_samples = -(-self.all_eval_samples // self.world)  # of the rank with the most
        # A batch that is never cut has one size: it fits, or nothing does.
        self.whole = needs_whole_batch(components.task)
        self.most_evaluated = min(self.share if self.whole else 2 * self.share, self.eval_samples)  # at once
        self._cached, self._cached_rank = functools.cache(self._trace), functools.cache(self._trace_rank)

    def at(self, size: int, eval_size: int, way: Way = FIRST) -> Trace:
        """Of the rank with the highest peak. size, eval_size: 0 leaves out training, or evaluation."""
        return self._cached(size, eval_size, way)

    def at_rank(self, rank: int, size: int, eval_size: int, way: Way = FIRST) -> Trace:
        """Of this rank."""
        return self._cached_rank(rank, size, eval_size, way)

    def variant(self, config: Config) -> "Planner":
        """Of a configuration with the same model and data: see `ranking`."""
        planner = Planner(config, self.components)
        planner.counts_work, planner.smallest = self.counts_work, self.smallest
        return planner

    @functools.cached_property
    def smallest(self) -> int:
        """The fewest samples at once on which the model can train, at most the share of a rank."""
        return self.share if self.whole else min(self.at(self.share, 0).smallest, self.share)

    def _trace(self, size: int, eval_size: int, way: Way) -> Trace:
        if self._steps is not None:
            return self._steps.trace(size, eval_size, self.share)
        samples = self._traced_samples(size) if size else self.all_eval_samples
        ranks = highest_ranks(self.world, self.shards, samples)
        return max((self.at_rank(rank, size, eval_size, way) for rank in ranks), key=lambda trace: trace.peak.total)

    def _trace_rank(self, rank: int, size: int, eval_size: int, way: Way) -> Trace:
        if self._steps is not None:
            return self.at(size, eval_size, way)
        self.traces += 1
        with simulated(rank, self.world, self.device) as ranks:
            return trace(
                self.config,
                self.components,
                size,
                eval_size,
                way,
                place=self.place,
                ranks=ranks,
                count_work=self.counts_work,
            )

    def bounds(self, size: int, eval_size: int, is_low_asked: bool = True) -> Bounds:
        """The lowest and the highest peak with these sizes."""
        return bounds(self.at, self.config.train.grad_clip, size, eval_size, is_low_asked)

    def search(self, only: Collection[str]) -> tuple[Facts, Peak | None]:
        """The largest micro-batches alone, and for training what a `Forecast` is made of.

        `largest_peak_bytes`: with the largest, or the smallest where none fits. `least_bytes`: the lowest that it may
        be. `elements`: per sample of the longest batch, 0 where all are alike. `certainty`: of training, if it is asked
        for; `eval_certainty`: of evaluation.
        """
        facts: Facts = {"limit_bytes": self.limit}
        if "evaluation" in only and self.eval_samples:
            largest = self.largest_eval()
            found = self.bounds(0, largest.size or 1, is_low_asked=False)
            facts |= {
                "largest_eval_micro_size": largest.size,
                "largest_eval_peak_bytes": found.high.total,
                "eval_certainty": found.certainty.name,
            }
            facts["certainty"] = facts["eval_certainty"]
        if "training" in only:
            largest = self.largest()
            size = largest.size or self.smallest
            found, traced = self.bounds(size, 0), self.at(size, 0)
            facts |= {
                "largest_micro_size": largest.size,
                "largest_peak_bytes": found.high.total,
                "least_bytes": found.low.total if traced.varies else found.high.total,
                "peaks": largest.peaks,
                "static_bytes": sum(traced.static.values()),
                "elements": traced.elements,
                "certainty": found.certainty.name,
            }
        return facts, None

    def plan(self) -> tuple[Facts, Peak | None]:
        """Everything. At the sizes that the configuration gives, else at the largest that fit, else at the smallest."""
        largest = self.largest().size
        largest_eval = self.largest_eval().size if self.eval_samples else None
        size = self.given_size() or largest or self.smallest
        eval_size = 0
        if self.eval_samples:
            given = self.config.batch.eval_micro_size
            eval_size = min(given, self.eval_samples) if given != "auto" else (largest_eval or 1)
        found = self.bounds(size, eval_size)
        ranks, high = self._ranks(size, eval_size), found.high
        highest = max(high.total, *ranks["peak_bytes"].values())  # of ranks with longer texts than the one traced
        facts: Facts = {
            "peak_bytes": highest,
            **certainty_of(found.noticed, found.low.total, highest).facts(),
            "binding_phase": high.phase,
            "binding_module": high.module,
            "phases": {name: high.phases[name] for name in PHASES if name in high.phases},
            "kinds": high.kinds,
            "ranks": ranks,
            "static": {kind.value: size for kind, size in self.at(size, 0).static.items()},
            "micro_size": size,
            "eval_micro_size": eval_size or None,
            "limit_bytes": self.limit,
            "largest_micro_size": largest,
            "largest_eval_micro_size": largest_eval,
            "most_micro_size": self.share,
            "most_eval_micro_size": self.most_evaluated or None,
        }
        return facts, high

    def _ranks(self, size: int, eval_size: int) -> Facts:
        """The ranks, and the peaks of those that differ: all others have one of these peaks, or one between them."""
        samples = self._traced_samples(size)
        own = {*highest_ranks(self.world, self.shards, samples)}
        if eval_size:
            own |= {*highest_ranks(self.world, self.shards, self.all_eval_samples)}
        if len(own) > 1 or samples % self.world or self.all_eval_samples % self.world or self.at(size, 0).uneven:
            own.add(self.world - 1)
        peaks = {}
        for rank in sorted(own):
            traces = [self.at_rank(rank, size, 0)]
            traces += [self.at_rank(rank, 0, eval_size)] if eval_size else []
            peaks[str(rank)] = joined(traces).total
        binding = max(peaks, key=lambda rank: peaks[rank])
        return {
            "world": self.world,
            "strategy": self.config.parallel.strategy,
            "replicas": self.world // self.shards,
            "binding_rank": int(binding),
            "peak_bytes": peaks,
        }

    def _traced_samples(self, size: int) -> int:
        """Of a traced step, over all ranks."""
        planned = planned_config(self.config, size, 1, self.world, self.components.has_embeddings)
        return at_most(planned.batch.global_size, self.components.train_data)

    def given_size(self) -> int | None:
        """The micro-batch that the configuration fixes, if it does."""
        if self.whole:
            size = self.config.batch.global_size
            require_uncut(self.config, self.world, at_most(size, self.components.train_data))
        batch, parts = self.config.batch, self.config.accumulation.steps
        if batch.micro_schedule is not None:
            plans = [plan for _, plan in micro_schedule.entries(batch.micro_schedule)]
            largest = max(max(plan.values()) if isinstance(plan, dict) else plan for plan in plans)
            return min(largest, self.share)
        if parts != "auto":
            return -(-self.share // parts)
        return min(batch.micro_size, self.share) if isinstance(batch.micro_size, int) else None

    def largest(self) -> Largest:
        """Training's largest micro-batch that fits the limit."""
        return self._fitting(lambda size, way: self.at(size, 0, way), self.share, self.smallest)

    def largest_eval(self) -> Largest:
        """Evaluation's, up to where the search of a run starts, twice the share of the global batch."""
        smallest = self.most_evaluated if self.whole else 1
        return self._fitting(lambda size, way: self.at(0, size, way), self.most_evaluated, smallest)

    def needed(self, trace: Trace) -> int:
        """The bytes that count against the limit."""
        return max(peak.total for peak in (trace.training, trace.evaluation, Peak()) if peak is not None)

    def _fitting(self, at: Callable[[int, Way], Trace], top: int, smallest: int) -> Largest:
        """The largest size from `smallest` to `top` that fits whichever way the run goes.

        at: `(size, way) -> trace`.
        """

        def needed(way: Way) -> Callable[[int], int]:
            return lambda size: self.needed(at(size, way))

        peaks: dict[int, int] = {}
        largest = largest_that_fits(needed(FIRST), self.limit, top, smallest, peaks)
        if not largest:
            return Largest(0, peaks)
        for way in ways_beside([at(largest, FIRST)], self.config.train.grad_clip, is_low_asked=False):
            try:
                others = {largest: needed(way)(largest)}
            except UserError:
                raise
            except Exception:  # `bounds` notes it
                continue
            if others[largest] <= peaks[largest]:
                continue
            if others[largest] > self.limit:
                largest = largest_that_fits(needed(way), self.limit, largest, smallest, others)
            peaks = others
            if not largest:
                break
        return Largest(largest, peaks)
