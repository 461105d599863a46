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
from trainapp.sweep.outcome import TrialState
from trainapp.sweep.space import Dimension, Space, Values

_DIRECTIONS = {"max": "maximize", "min": "minimize"}
_FEWEST_FOR_IMPORTANCE = 10  # finished trials that say anything about the importance of a setting
_MOST_DRAWS = 100  # to draw a configuration that has not run yet
_AFTER_ALL_RUNGS = 10**6  # stands for the rung of a value that a stopped trial has

Proposal = tuple[Values, dict[str, Any]]  # with what a sampler of Optuna notes of it, such as its generation
# Arguments: the number of the coming trial, those so far, and max or min (empty while nothing has finished). Returns
# None if no configuration is left.
Propose = Callable[[int, Sequence[Trial], str], Proposal | None]
# The same, from a list of numbers to seed from in place of the trial's number; may repeat a configuration.
Draw = Callable[[list[int], Sequence[Trial], str], Proposal]


def build(settings: Sweep, space: Space) -> Propose:
    """Return the sampler of `sweep.sampler`. Raises UserError for one that does not suit the space."""
    _require_suitable(settings, space)
    draw: Draw | None = None  # a grid is not drawn
    if settings.sampler == "random":
        draw = _random(space)
    elif settings.sampler != "grid":
        draw = _of_optuna(settings.sampler, space)

    def propose(number: int, trials: Sequence[Trial], direction: str) -> Proposal | None:
        configurations = {trial.values for trial in trials}

        # A draw may repeat a configuration: draw again, from another seed.
        if draw is not None:
            for draw_number in range(_MOST_DRAWS):
                proposal = draw([settings.seed, number, draw_number], trials, direction)
                values, _ = proposal
                if values not in configurations:
                    return proposal

        # A grid in order, or what draws have missed of a finite space.
        if space.intervals:
            return None
        for values in space.grid():
            if values not in configurations:
                return values, {}
        return None

    return propose


def _require_suitable(settings: Sweep, space: Space) -> None:
    """Raise UserError if the sampler does not suit the space."""
    # An interval has infinitely many values.
    intervals = ", ".join(space.intervals)
    if settings.sampler == "grid" and intervals:
        raise UserError(
            f"sweep.sampler=grid: {intervals} is an interval, of which there is no grid; list values, or use "
            "sweep.sampler=random or tpe with sweep.trials=N"
        )
    if settings.trials is None and intervals:
        raise UserError(
            f"sweep.trials=null: {intervals} is an interval, and the sweep would never end; set the number of "
            "configurations, such as sweep.trials=20"
        )

    # Samplers that learn from results look for the best value of each setting.
    learns = settings.sampler not in ("grid", "random")
    keys = [dimension.key for dimension in space.dimensions]
    if learns and "train.seed" in keys:
        raise UserError("sweep.sampler: it would look for the luckiest train.seed; sweep that by grid or random")


def _random(space: Space) -> Draw:
    """Return a sampler of random configurations."""

    def draw(seed: list[int], trials: Sequence[Trial], direction: str) -> Proposal:
        rng = np.random.default_rng(seed)
        texts = [_random_text(dimension, rng) for dimension in space.dimensions]
        return tuple(texts), {}

    return draw


def _random_text(dimension: Dimension, rng: np.random.Generator) -> str:
    """Return a random value, as in an override."""
    if dimension.values:
        position = rng.integers(len(dimension.values))
        return dimension.values[position]
    value: Any
    if dimension.is_log:
        logarithm = rng.uniform(math.log(dimension.low), math.log(dimension.high))
        value = math.exp(logarithm)
    elif dimension.is_whole:
        value = rng.integers(int(dimension.low), int(dimension.high) + 1)
    else:
        value = rng.uniform(dimension.low, dimension.high)
    return dimension.text(value)


def _of_optuna(sampler: str | Target, space: Space) -> Draw:
    """Return a sampler of Optuna. Its study is rebuilt from the trials for each proposal."""
    name = sampler if isinstance(sampler, str) else sampler.target
    targets.require_package("optuna", f"sweep.sampler={name}")
    if isinstance(sampler, str):
        # Values of running trials count as bad, so that jobs at the same time differ.
        sampler = Target("optuna.samplers.TPESampler", {"multivariate": True, "constant_liar": True})
    sampler_class: Any = targets.locate(sampler.target, "sweep.sampler._target_", ["optuna"])
    arguments = sampler.arguments
    takes_seed = "seed" in parameters_of(sampler_class)

    def draw(seed: list[int], trials: Sequence[Trial], direction: str) -> Proposal:
        # A seed of the user's own replaces this one.
        keywords: dict[str, Any] = {}
        if takes_seed:
            rng = np.random.default_rng(seed)
            keywords["seed"] = int(rng.integers(2**32))
        keywords |= arguments

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of Optuna are experimental by its own word
            optuna_sampler = sampler_class(**keywords)
            study = study_of(space, trials, direction, optuna_sampler)
        values = study.ask(distributions_of(space)).params
        texts = [dimension.text(values[dimension.key]) for dimension in space.dimensions]
        asked_trial = study.get_trials(deepcopy=False)[-1]
        return tuple(texts), asked_trial.system_attrs

    # A first draw shows mistakes in the arguments before the sweep begins.
    try:
        draw([0], [], "")
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"sweep.sampler: {sampler_class.__name__}: {error}") from None
    return draw


def distributions_of(space: Space) -> dict[str, Any]:
    """Return the space in Optuna's terms."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, Any] = {}
    for dimension in space.dimensions:
        if dimension.values:
            distribution = CategoricalDistribution(dimension.values)
        elif dimension.is_whole:
            distribution = IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
        else:
            distribution = FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)
        distributions[dimension.key] = distribution
    return distributions


def study_of(space: Space, trials: Sequence[Trial], direction: str, sampler: Any = None) -> Any:
    """Return the trials as a study of Optuna, in memory."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler, direction=_DIRECTIONS.get(direction))
    for trial in trials:
        study.add_trial(_as_optuna(space, trial))
    return study


def _as_optuna(space: Space, trial: Trial) -> Any:
    """Return a trial in Optuna's terms."""
    from optuna.trial import create_trial

    # A stopped trial has no final value, but samplers can still learn from its best so far.
    best = trial.facts.get("best_objective")
    rung_values = {rung: value for rung, value in trial.rung_values.items() if value is not None}
    if trial.state is TrialState.STOPPED and best is not None:
        rung_values[_AFTER_ALL_RUNGS] = best

    parameters = {}
    for dimension, text in zip(space.dimensions, trial.values, strict=True):
        parameters[dimension.key] = dimension.value(text)
    final_value = best if trial.state is TrialState.FINISHED else None
    return create_trial(
        state=_optuna_state(trial),
        value=final_value,
        params=parameters,
        distributions=distributions_of(space),
        system_attrs=dict(trial.attributes),
        user_attrs={"job": trial.number, "directory": trial.folder},
        intermediate_values=rung_values,
    )


def _optuna_state(trial: Trial) -> Any:
    """Return Optuna's state of a trial.

    What does not fit, diverges or pauses at a rung is reported as pruned, which samplers learn from: they ignore failed
    trials, and what failed for another reason says nothing about its configuration.
    """
    from optuna.trial import TrialState as OptunaState

    has_best = trial.facts.get("best_objective") is not None
    if trial.state is TrialState.FINISHED:
        return OptunaState.COMPLETE if has_best else OptunaState.PRUNED
    if trial.state in (TrialState.PAUSED, TrialState.INFEASIBLE) or trial.diverged:
        return OptunaState.PRUNED
    if trial.state is TrialState.STOPPED and has_best:  # as by train.max_time
        return OptunaState.PRUNED
    if trial.state is TrialState.FAILED:
        return OptunaState.FAIL
    return OptunaState.RUNNING


def copy_to_storage(url: str, name: str, space: Space, trials: Sequence[Trial], direction: str) -> None:
    """Add the trials that have ended, and are not there yet, to the study of this name, for Optuna's dashboard.

    Raises UserError if the storage cannot be used.
    """
    import optuna

    try:
        study = optuna.create_study(
            storage=url, study_name=name, direction=_DIRECTIONS.get(direction), load_if_exists=True
        )
        stored_jobs = {stored.user_attrs.get("job") for stored in study.get_trials(deepcopy=False)}
        for trial in trials:
            if trial.state.has_ended and trial.number not in stored_jobs:
                study.add_trial(_as_optuna(space, trial))
    except Exception as error:  # of SQLAlchemy, of its drivers, of the network
        raise UserError(f"sweep.storage={url}: {type(error).__name__}: {error}") from None


def importances(space: Space, trials: Sequence[Trial], direction: str) -> dict[str, float]:
    """Return the share of each setting in the differences between trials, by PED-ANOVA (Watanabe et al. 2023,
    arXiv:2304.10255); empty without Optuna, or with fewer than `_FEWEST_FOR_IMPORTANCE` finished trials.
    """
    finished = [trial for trial in trials if trial.state is TrialState.FINISHED]
    if len(finished) < _FEWEST_FOR_IMPORTANCE:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `_of_optuna`
        try:
            from optuna import importance

            study = study_of(space, trials, direction)
            evaluator = importance.PedAnovaImportanceEvaluator()
            shares = importance.get_param_importances(study, evaluator=evaluator)
        except (ImportError, ValueError, RuntimeError):
            return {}
    return dict(shares)
