"""The peak of one configuration at any micro-batch size, and the largest sizes that fit."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.plan.assumed_shapes import Share
from trainapp.plan.largest import largest_that_fits
from trainapp.plan.place import Place
from trainapp.plan.ranks import highest_ranks, simulated, world_of
from trainapp.plan.real_steps import RealSteps
from trainapp.plan.recorder import PHASES, Peak
from trainapp.plan.traced_part import planned_config
from trainapp.plan.traced_run import ON_CPU, Trace, trace
from trainapp.train.components import Components, choose_device

EXACT, RANGE, PROBED, NOT_TRACEABLE = "exact", "range", "probed", "not traceable"
Facts = dict[str, Any]


class Planner:
    """Traces one configuration at the sizes that the plan needs, each at most once."""

    def __init__(self, config: Config, components: Components, steps: RealSteps | None = None):
        """steps: run for real in place of traces."""
        self.config, self.components, self._steps = config, components, steps
        self.counts_work = False  # whether traces also count operations
        self.traces = 0
        self.certainty = EXACT  # RANGE once a trace has made something up, PROBED once it has run an operator
        self.place: Place = ON_CPU
        self.limit = self.place.limit(config)
        self.world = world_of(config)
        is_sharded = config.parallel.strategy == "fsdp" and self.world > 1
        self.shards = self.world // config.parallel.fsdp.replicas if is_sharded else 1
        self.device = choose_device(config.train.device)
        self.share = -(-min(config.batch.global_size, len(components.train_data)) // self.world)
        evaluated = components.eval_data
        evaluates = evaluated is not None and config.every.eval is not None
        self.all_eval_samples = len(evaluated) if evaluates else 0
        self.eval_samples = -(-self.all_eval_samples // self.world)  # of the rank with the most
        self.at, self.at_rank = functools.cache(self._trace), functools.cache(self._trace_rank)

    def variant(self, config: Config) -> "Planner":
        """Of a configuration with the same model and data: see `ranking`."""
        planner = Planner(config, self.components)
        planner.counts_work, planner.smallest = self.counts_work, self.smallest
        return planner

    @functools.cached_property
    def smallest(self) -> int:
        """The model cannot train on fewer samples at once."""
        return self.at(self.share, 0).smallest

    def _trace(
        self, size: int, eval_size: int, otherwise: bool = False, which: str = "longest", share: Share = Share.MOST
    ) -> Trace:
        """Of the rank with the highest peak. size, eval_size: 0 leaves out training, or evaluation."""
        if self._steps is not None:
            return self._steps.trace(size, eval_size, self.share)
        samples = self._traced_samples(size) if size else self.all_eval_samples
        traces = [
            self.at_rank(rank, size, eval_size, otherwise, which, share)
            for rank in highest_ranks(self.world, self.shards, samples)
        ]
        return max(traces, key=lambda found: found.peak.total)

    def _trace_rank(self, rank: int, size: int, eval_size: int, otherwise: bool, which: str, share: Share) -> Trace:
        training_size = size or self.smallest  # before this rank is simulated: a process can be one rank at a time
        self.traces += 1
        with simulated(rank, self.world, self.device) as ranks:
            found = trace(
                self.config,
                self.components,
                training_size,
                eval_size or 1,
                training=size > 0,
                evaluation=eval_size > 0,
                otherwise=otherwise,
                which="longest" if which == "longest" else "shortest",
                place=self.place,
                ranks=ranks,
                share=share,
                count_work=self.counts_work,
            )
        if found.reads or found.varies or found.assumed or found.unsettled:
            self.certainty = RANGE
        elif found.probed and self.certainty == EXACT:
            self.certainty = PROBED
        return found

    def _at_rank(self, rank: int, size: int, eval_size: int) -> Trace:
        if self._steps is not None:
            return self.at(size, eval_size)
        return self.at_rank(rank, size, eval_size, False, "longest", Share.MOST)

    def search(self, only: Collection[str]) -> tuple[Facts, Peak | None]:
        """The largest micro-batches alone. `largest_peak_bytes`: what training's is predicted to need; `bucket`: the
        shape that it is for, see `bucket_of`, or 0 where all batches have one.
        """
        facts: Facts = {"limit_bytes": self.limit}
        if "training" in only:
            facts["largest_micro_size"] = largest = self.largest()
            traced = self.at(largest or self._smallest(), 0)
            facts |= {"largest_peak_bytes": self._joined([traced]).total, "bucket": traced.bucket}
        if "evaluation" in only:
            facts["largest_eval_micro_size"] = self.largest_eval() if self.eval_samples else None
        return {"certainty": self.certainty} | facts, None

    def plan(self) -> tuple[Facts, Peak | None]:
        """Everything. At the sizes that the configuration gives, else at the largest that fit, else at the smallest."""
        largest = self.largest()
        largest_eval = self.largest_eval() if self.eval_samples else None
        size = self.given_size() or largest or self._smallest()
        eval_size = 0
        if self.eval_samples:
            given = self.config.batch.eval_micro_size
            eval_size = min(given, self.eval_samples) if given != "auto" else (largest_eval or 1)
        low, high, notes = self._bounds(size, eval_size)
        probed = sorted({operator for found in self._base(size, eval_size) for operator in found.probed})
        ranks = self._ranks(size, eval_size)
        highest = max(high.total, *ranks["peak_bytes"].values())  # of ranks with longer texts than the one traced
        certainty = RANGE if low.total != highest or notes else PROBED if probed else EXACT
        if probed:
            notes.append(f"run for real to know what they allocate: {', '.join(probed)}")
        facts: Facts = {
            "peak_bytes": highest,
            "certainty": certainty,
            **({"range_bytes": [low.total, highest]} if certainty == RANGE else {}),
            **({"notes": notes} if notes else {}),
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
            traces = [self._at_rank(rank, size, 0)]
            traces += [self._at_rank(rank, 0, eval_size)] if eval_size else []
            peaks[str(rank)] = self._joined(traces).total
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
        return min(planned_config(self.config, size, 1, self.world).batch.global_size, len(self.components.train_data))

    def given_size(self) -> int | None:
        """The micro-batch that the configuration fixes, if it does."""
        batch, parts = self.config.batch, self.config.accumulation.steps
        if batch.micro_schedule is not None:
            plans = batch.micro_schedule.values()
            largest = max(max(plan.values()) if isinstance(plan, dict) else plan for plan in plans)
            return min(largest, self.share)
        if parts != "auto":
            return -(-self.share // parts)
        return min(batch.micro_size, self.share) if isinstance(batch.micro_size, int) else None

    def _smallest(self) -> int:
        return min(self.smallest, self.share)

    def largest(self) -> int:
        """Training's largest micro-batch that fits the limit; 0 if none does."""
        return self._fitting(lambda size, *other: self.at(size, 0, *other), self.share, self._smallest())

    def _needed(self, found: Trace) -> int:
        """The bytes that count against the limit."""
        return max(peak.total for peak in (found.training, found.evaluation, Peak()) if peak is not None)

    def largest_eval(self) -> int:
        """Up to where the search of a run starts, twice the share of the global batch."""
        top = min(2 * self.share, self.eval_samples)
        return self._fitting(lambda size, *other: self.at(0, size, *other), top, 1)

    def _fitting(self, at: Callable[..., Trace], top: int, smallest: int) -> int:
        """The largest size from `smallest` to `top` that fits whatever the model reads; 0 if none does.

        at: `(size) -> trace`; `(size, True)` answers reads the other way.
        """

        def peak_of(size: int, *other: bool) -> int:
            return self._needed(at(size, *other))

        largest = largest_that_fits(peak_of, self.limit, top, smallest)
        if not largest or not at(largest).reads:
            return largest
        try:
            other_fits = peak_of(largest, True) <= self.limit
        except UserError:
            raise
        except Exception:  # `_bounds` notes it
            return largest
        if other_fits:
            return largest
        return largest_that_fits(lambda size: peak_of(size, True), self.limit, largest, smallest)

    def _base(self, size: int, eval_size: int) -> list[Trace]:
        return [self.at(size, 0), *([self.at(0, eval_size)] if eval_size else [])]

    def _bounds(self, size: int, eval_size: int) -> tuple[Peak, Peak, list[str]]:
        """The lowest and the highest peak that the run may have, and why they differ."""
        notes: list[str] = []
        traces = self._base(size, eval_size)
        high = low = self._joined(traces)
        if any(found.varies for found in traces):
            notes.append(
                "the batches differ in shape: the longest of the first ones counts, and a longer one needs more"
            )
            shortest = self._joined([self.at(size, 0, False, "shortest")])
            low = shortest if shortest.total < low.total else low
        reads = sorted({phase for found in traces for phase in found.reads})
        if reads:
            notes.append(
                f"values are read ({', '.join(reads)}): traced as all true and as all false; a mix may need more"
            )
        assumed = sorted({operation for found in traces for operation in found.assumed})
        if assumed:
            notes.append(
                f"shapes depend on values ({', '.join(assumed)}): the range is from nothing to everything selected; of "
                "a router, from equal parts to the same choice for all"
            )
        if unsettled := sorted({reason for found in traces for reason in found.unsettled}):
            notes.append(f"other steps may need more: {', '.join(unsettled)}")
        clips = high.phase == "clip" and self.config.train.grad_clip is not None
        # Whether gradients will be clipped is not known either.
        for otherwise, share in _ways(bool(reads or clips), bool(assumed)):
            arguments = (otherwise, "longest", share)
            try:
                evaluated = [self.at(0, eval_size, *arguments)] if eval_size else []
                other = self._joined([self.at(size, 0, *arguments), *evaluated])
            except UserError:
                raise
            except Exception as error:
                notes.append(f"the other way cannot be traced ({reason_of(error)})")
            else:
                low = other if other.total < low.total else low
                high = other if other.total > high.total else high
        return low, high, notes

    @staticmethod
    def _joined(traces: list[Trace]) -> Peak:
        return functools.reduce(Peak.joined, [found.peak for found in traces])


def _ways(reads: bool, shapes: bool) -> list[tuple[bool, Share]]:
    """In which other ways a run may go: reads answered otherwise, other elements selected, or both."""
    others = [(False, Share.FEWEST), (False, Share.LAST)] if shapes else []
    if reads:
        others += [(True, Share.MOST), *([(True, Share.FEWEST)] if shapes else [])]
    return others


def reason_of(error: BaseException) -> str:
    """The error in one line, with its type: torch names the operation in its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
