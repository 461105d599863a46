"""The peak of one configuration at any micro-batch size, and the largest sizes that fit."""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from trainapp.assembly.components import Components, choose_device
from trainapp.config.schema import Config
from trainapp.data.stream_reader import at_most
from trainapp.planning import step_time
from trainapp.planning.bounds import Bounds, bounds, joined, traced_ways, ways_beside
from trainapp.planning.certainty import certainty_of
from trainapp.planning.largest import largest_that_fits
from trainapp.planning.place import Place
from trainapp.planning.ranks import highest_ranks, simulated, world_of
from trainapp.planning.recorder import PHASES, Peak
from trainapp.planning.step_work import Speeds, Work
from trainapp.planning.traced_part import planned_config
from trainapp.planning.traced_run import ON_CPU, Trace, trace
from trainapp.planning.ways import FIRST, Way
from trainapp.planning.workload import given_size, require_uncut_batch, workload_of
from trainapp.techniques.lever import Lever

Facts = dict[str, Any]


class Measured(NamedTuple):
    """A configuration with some sizes. total: the bytes that have to fit, of the highest peak that a run may have.

    bytes: of plan.json, by key. phases: bytes of live tensors. work: a step's operations.
    """

    total: int
    bytes: dict[str, int]
    phases: dict[str, int]
    certainty: str
    work: Work


class Largest(NamedTuple):
    """The largest size that fits, 0 if none does. peaks: by size, of the way that needs the most."""

    size: int
    peaks: dict[int, int]


class Planner:
    """Traces one configuration at the sizes that the plan needs, each at most once.

    error_of_time: relative, of the estimate: a gain below it may be none.
    """

    error_of_time = 0.15

    def __init__(self, config: Config, components: Components):
        self.config, self.components = config, components
        self.counts_work = False  # whether traces also count operations
        self.traces = 0
        self.place: Place = ON_CPU
        self.limit = self.place.limit(config)
        self.world = world_of(config)
        is_sharded = config.parallel.strategy == "fsdp" and self.world > 1
        self.shards = self.world // config.parallel.fsdp.replicas if is_sharded else 1
        self.device = choose_device(config.train.device)
        self.workload = workload_of(config, components, self.world)
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
        planner.speeds = self.speeds
        return planner

    @functools.cached_property
    def smallest(self) -> int:
        """The fewest samples at once on which the model can train, at most the share of a rank."""
        share = self.workload.share
        return share if self.workload.whole else min(self.at(share, 0).smallest, share)

    def _trace(self, size: int, eval_size: int, way: Way) -> Trace:
        samples = self._traced_samples(size) if size else self.workload.all_eval_samples
        ranks = highest_ranks(self.world, self.shards, samples)
        return max((self.at_rank(rank, size, eval_size, way) for rank in ranks), key=lambda trace: trace.peak.total)

    def _trace_rank(self, rank: int, size: int, eval_size: int, way: Way) -> Trace:
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

    @property
    def room(self) -> int:
        """The bytes that what is said to fit may take."""
        return self.limit

    @functools.cached_property
    def speeds(self) -> Speeds:
        """What operations take on the device."""
        return step_time.Speeds(self.device)

    def shows(self, lever: Lever) -> bool:
        """Whether a trace of this configuration shows what the lever does."""
        of_ranks = lever.is_of_several_ranks and self.config.parallel.strategy == "single"
        return lever.shows_in_a_trace and not of_ranks

    def levers(self, size: int) -> tuple[Lever, ...]:
        """Those that apply and are not in force."""
        return self.at(size, 0).levers

    def needed_by_eval(self, eval_size: int) -> int:
        """The bytes of an evaluation that have to fit."""
        return self.bounds(0, eval_size, is_low_asked=False).high.total

    def measured(self, size: int, eval_size: int) -> Measured:
        """With these sizes; an `eval_size` of 0 leaves out evaluation. For traces that count operations."""
        work = self.at(size, 0).work
        assert work is not None, "traced without counting its operations"
        found = self.bounds(size, eval_size, is_low_asked=False)
        high = found.high
        return Measured(high.total, {"peak_bytes": high.total}, high.phases, found.certainty.name, work)

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
        if "evaluation" in only and self.workload.eval_samples:
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
        require_uncut_batch(self.config, self.components, self.world)
        workload, largest = self.workload, self.largest().size
        largest_eval = self.largest_eval().size if self.workload.eval_samples else None
        size = given_size(self.config, workload.share) or largest or self.smallest
        eval_size = 0
        if self.workload.eval_samples:
            given = self.config.batch.eval_micro_size
            eval_size = min(given, self.workload.eval_samples) if given != "auto" else (largest_eval or 1)
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
            "most_micro_size": self.workload.share,
            "most_eval_micro_size": self.workload.most_evaluated or None,
        }
        return facts, high

    def _ranks(self, size: int, eval_size: int) -> Facts:
        """The ranks, and the peaks of those that differ: all others have one of these peaks, or one between them."""
        samples, evaluated = self._traced_samples(size), self.workload.all_eval_samples
        own = {*highest_ranks(self.world, self.shards, samples)}
        if eval_size:
            own |= {*highest_ranks(self.world, self.shards, evaluated)}
        if len(own) > 1 or samples % self.world or evaluated % self.world or self.at(size, 0).uneven:
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

    def largest(self) -> Largest:
        """Training's largest micro-batch that fits the limit."""
        return self._fitting(lambda size, way: self.at(size, 0, way), self.workload.share, self.smallest)

    def largest_eval(self) -> Largest:
        """Evaluation's, up to where the search of a run starts, twice the share of the global batch."""
        smallest = self.workload.most_evaluated if self.workload.whole else 1
        return self._fitting(lambda size, way: self.at(0, size, way), self.workload.most_evaluated, smallest)

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

        def with_size_so_far(way: Way) -> tuple[Way, int]:
            return way, needed(way)(largest)

        ways = ways_beside([at(largest, FIRST)], self.config.train.grad_clip, is_low_asked=False)
        for way, bytes_needed in traced_ways(with_size_so_far, ways):
            if bytes_needed <= peaks[largest]:
                continue
            others = {largest: bytes_needed}
            if bytes_needed > self.limit:
                largest = largest_that_fits(needed(way), self.limit, largest, smallest, others)
            peaks = others
            if not largest:
                break
        return Largest(largest, peaks)
