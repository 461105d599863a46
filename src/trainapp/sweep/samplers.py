"""What to run next: every point of a grid, random points, or what a sampler of Optuna proposes.

Nothing is kept between proposals: each follows from the journal, `sweep.seed` and the trial's number, so that a sweep
that was killed proposes what an undisturbed one would. No configuration is proposed twice.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainapp.config import targets
from trainapp.config.arguments import parameters_of
from trainapp.config.schema import Sweep, Target
from trainapp.errors import UserError
from trainapp.sweep.journal import Trial
from trainapp.sweep.space import Dimension, Space, Values

_DIRECTIONS = {"max": "maximize", "min": "minimize"}
_FEWEST = 10  # finished trials that say anything about the importance of a setting
_TRIES = 100  # to draw a configuration that has not run yet


Proposal = tuple[Values, dict[str, Any]]  # with what a sampler of Optuna notes of it, such as its generation
# From the number of the coming trial, those so far, and max or min (empty while nothing has finished); None if no
# configuration is left.
Propose = Callable[[int, Sequence[Trial], str], Proposal | None]
Draw = Callable[[list[int], Sequence[Trial], str], Proposal]  # of what to seed from in place of the number


def build(settings: Sweep, space: Space) -> Propose:
    """The sampler of `sweep.sampler`. Raises UserError for one that does not suit the space."""
    own, intervals = settings.sampler, ", ".join(space.intervals)
    if own == "grid" and intervals:
        raise UserError(
            f"sweep.sampler=grid: {intervals} is an interval, of which there is no grid; list values, or use "
            "sweep.sampler=random or tpe with sweep.trials=N"
        )
    if settings.trials is None and intervals:
        raise UserError(
            f"sweep.trials=null: {intervals} is an interval, and the sweep would never end; set the number of "
            "configurations, such as sweep.trials=20"
        )
    if own not in ("grid", "random") and any(of.key == "train.seed" for of in space.dimensions):
        raise UserError("sweep.sampler: it would look for the luckiest train.seed; sweep that by grid or random")
    draws = None if own == "grid" else _random(space) if own == "random" else _of_optuna(own, space)

    def propose(number: int, trials: Sequence[Trial], direction: str) -> Proposal | None:
        known = {trial.values for trial in trials}
        drawn = (draws([settings.seed, number, attempt], trials, direction) for attempt in range(_TRIES) if draws)
        found = next((own for own in drawn if own[0] not in known), None)
        if found is not None or intervals:
            return found
        return next(((values, {}) for values in space.grid() if values not in known), None)

    return propose


def _random(space: Space) -> Draw:
    def text(of: Dimension, rng: np.random.Generator) -> str:
        if of.values:
            return of.values[rng.integers(len(of.values))]
        if of.is_log:
            return of.text(math.exp(rng.uniform(math.log(of.low), math.log(of.high))))
        return of.text(rng.integers(int(of.low), int(of.high) + 1) if of.is_whole else rng.uniform(of.low, of.high))

    def draw(seed: list[int], trials: Sequence[Trial], direction: str) -> Proposal:
        rng = np.random.default_rng(seed)
        return tuple(text(of, rng) for of in space.dimensions), {}

    return draw


def _of_optuna(own: str | Target, space: Space) -> Draw:
    """A sampler of Optuna. Its study is rebuilt from the trials for each proposal."""
    targets.require_package("optuna", f"sweep.sampler={own if isinstance(own, str) else own.target}")
    if isinstance(own, str):
        # Values of running trials count as bad, so that jobs at the same time differ.
        own = Target("optuna.samplers.TPESampler", {"multivariate": True, "constant_liar": True})
    kind: Any = targets.locate(own.target, "sweep.sampler._target_", ["optuna"])
    arguments, takes_seed = own.arguments, "seed" in parameters_of(kind)

    def draw(seed: list[int], trials: Sequence[Trial], direction: str) -> Proposal:
        seeded = {"seed": int(np.random.default_rng(seed).integers(2**32))} if takes_seed else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of Optuna are experimental by its own word
            study = study_of(space, trials, direction, kind(**seeded | arguments))
        found = study.ask(distributions_of(space)).params
        texts = tuple(of.text(found[of.key]) for of in space.dimensions)
        return texts, study.get_trials(deepcopy=False)[-1].system_attrs

    try:
        draw([0], [], "")
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"sweep.sampler: {kind.__name__}: {error}") from None
    return draw


def distributions_of(space: Space) -> dict[str, Any]:
    """The space in Optuna's terms."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    return {
        of.key: CategoricalDistribution(of.values)
        if of.values
        else IntDistribution(int(of.low), int(of.high), log=of.is_log)
        if of.is_whole
        else FloatDistribution(of.low, of.high, log=of.is_log)
        for of in space.dimensions
    }


def study_of(space: Space, trials: Sequence[Trial], direction: str, sampler: Any = None) -> Any:
    """The trials as a study of Optuna, in memory."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler, direction=_DIRECTIONS.get(direction))
    for trial in trials:
        study.add_trial(_as_optuna(space, trial))
    return study


def _as_optuna(space: Space, trial: Trial) -> Any:
    """What does not fit, diverges or pauses at a rung is told as pruned, which samplers learn from: they ignore failed
    trials, and what failed for another reason says nothing of its configuration.
    """
    from optuna.trial import TrialState, create_trial

    best = trial.facts.get("best_objective")
    reached = {rung: own for rung, own in trial.reached.items() if own is not None}
    state, value = TrialState.RUNNING, None
    if trial.state == "finished":
        state, value = TrialState.PRUNED if best is None else TrialState.COMPLETE, best
    elif trial.state in ("paused", "infeasible") or trial.diverged:
        state = TrialState.PRUNED
    elif trial.state == "stopped" and best is not None:  # as by train.max_time
        state, reached = TrialState.PRUNED, reached | {10**6: best}
    elif trial.state == "failed":
        state = TrialState.FAIL
    return create_trial(
        state=state,
        value=value,
        params={of.key: of.value(own) for of, own in zip(space.dimensions, trial.values, strict=True)},
        distributions=distributions_of(space),
        system_attrs=dict(trial.attributes),
        user_attrs={"job": trial.number, "directory": trial.folder},
        intermediate_values=reached,
    )


def copy_to_storage(url: str, name: str, space: Space, trials: Sequence[Trial], direction: str) -> None:
    """Add the trials that have ended, and are not there yet, to the study of this name, for Optuna's dashboard.

    Raises UserError if the storage cannot be used.
    """
    import optuna

    try:
        study = optuna.create_study(
            storage=url, study_name=name, direction=_DIRECTIONS.get(direction), load_if_exists=True
        )
        known = {own.user_attrs.get("job") for own in study.get_trials(deepcopy=False)}
        for trial in trials:
            if trial.state in ("finished", "failed", "infeasible") and trial.number not in known:
                study.add_trial(_as_optuna(space, trial))
    except Exception as error:  # of SQLAlchemy, of its drivers, of the network
        raise UserError(f"sweep.storage={url}: {type(error).__name__}: {error}") from None


def importances(space: Space, trials: Sequence[Trial], direction: str) -> dict[str, float]:
    """The share of each setting in the differences between trials, by PED-ANOVA (Watanabe et al. 2023,
    arXiv:2304.10255); empty without Optuna, or with fewer than _FEWEST finished trials.
    """
    if sum(trial.state == "finished" for trial in trials) < _FEWEST:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from optuna import importance

            evaluator = importance.PedAnovaImportanceEvaluator()
            return dict(importance.get_param_importances(study_of(space, trials, direction), evaluator=evaluator))
        except (ImportError, ValueError, RuntimeError):
            return {}
