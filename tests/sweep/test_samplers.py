"""What runs next follows from the journal alone, and nothing is proposed twice."""

import math
from collections import Counter

import pytest

from trainapp.config.schema import Sweep, Target
from trainapp.errors import UserError
from trainapp.sweep import samplers
from trainapp.sweep.journal import Trial
from trainapp.sweep.outcome import TrialState
from trainapp.sweep.space import Dimension, Space

SPACE = Space((), (Dimension("lr", (), 1e-4, 1.0, is_log=True), Dimension("width", (), 4, 64, is_whole=True)))
CHOICES = Space((), (Dimension("a", ("1", "2", "3")), Dimension("b", ("x", "y"))))


def settings(**own):
    return Sweep(**({"sampler": "random", "trials": 20} | own))


def quality(values):
    """Best at lr 0.01; the width does not matter."""
    return -abs(math.log10(float(values[0])) + 2)


def swept(space, count, own, kill_at=(), sign=1):
    """A sweep, one trial at a time, whose sampler is built anew after some trials. sign: -1 seeks the worst."""
    trials, sampler = [], samplers.build(own, space)
    for number in range(count):
        if number in kill_at:
            sampler = samplers.build(own, space)
        found = sampler(number, trials, "max" if trials else "")
        if found is None:
            break
        values, attributes = found
        facts = {"metric": "m", "direction": "max", "best_objective": sign * quality(values) if space is SPACE else 0.0}
        trials.append(Trial(number, values, TrialState.FINISHED, facts=facts, attributes=attributes))
    return [trial.values for trial in trials]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sweep_that_was_killed_proposes_the_same(sampler):
    pytest.importorskip("optuna")
    own = settings(sampler=sampler)
    assert swept(SPACE, 14, own) == swept(SPACE, 14, own, kill_at=(3, 11, 12))
    assert swept(SPACE, 14, own) != swept(SPACE, 14, settings(sampler=sampler, seed=1))


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_no_configuration_twice_and_the_end_of_a_finite_space(sampler):
    pytest.importorskip("optuna")
    found = swept(CHOICES, 20, settings(sampler=sampler))
    assert sorted(found) == sorted(CHOICES.grid())


def test_a_grid_that_has_grown_runs_only_what_is_new():
    known = [Trial(number, values, TrialState.FINISHED) for number, values in enumerate(CHOICES.grid())]
    larger = Space((), (Dimension("a", ("0", "1", "2", "3")), Dimension("b", ("x", "y"))))
    grid = samplers.build(settings(sampler="grid"), larger)
    assert grid(6, known, "") == (("0", "x"), {})
    known.append(Trial(6, ("0", "x"), TrialState.FINISHED))
    assert grid(7, known, "") == (("0", "y"), {})
    known.append(Trial(7, ("0", "y"), TrialState.FINISHED))
    assert grid(8, known, "") is None


def test_random_draws_cover_an_interval_by_its_logarithm():
    rates = [math.log10(float(values[0])) for values in swept(SPACE, 400, settings())]
    by_decade = Counter(math.floor(rate) for rate in rates)
    assert set(by_decade) == {-4, -3, -2, -1}
    assert min(by_decade.values()) > 70  # of 100 each; uniform draws would give the last 360
    assert {int(values[1]) for values in swept(SPACE, 400, settings())} == set(range(4, 65))


def test_tpe_looks_where_the_objective_says():
    """The opposite direction would look at the ends of the interval."""
    pytest.importorskip("optuna")

    def distance(sign):
        values = swept(SPACE, 40, settings(sampler="tpe"), sign=sign)[20:]
        return sum(abs(math.log10(float(own[0])) + 2) for own in values) / len(values)

    assert distance(1) < 0.85 < 1.2 < distance(-1)


def test_what_does_not_fit_or_diverges_teaches_and_a_failure_does_not():
    optuna = pytest.importorskip("optuna")
    states = [
        (TrialState.FINISHED, "", {"best_objective": 0.5}, optuna.trial.TrialState.COMPLETE),
        (TrialState.FINISHED, "", {"best_objective": None}, optuna.trial.TrialState.PRUNED),  # nan at every evaluation
        (TrialState.INFEASIBLE, "out_of_memory", {}, optuna.trial.TrialState.PRUNED),
        (TrialState.FAILED, "not_finite", {}, optuna.trial.TrialState.PRUNED),
        (TrialState.FAILED, "exception", {}, optuna.trial.TrialState.FAIL),
        (TrialState.PAUSED, "", {}, optuna.trial.TrialState.PRUNED),
        (TrialState.STOPPED, "", {}, optuna.trial.TrialState.RUNNING),
    ]
    trials = [
        Trial(number, (str(0.01 + number / 100), "8"), state, error_kind=error_kind, facts=facts)
        for number, (state, error_kind, facts, _) in enumerate(states)
    ]
    study = samplers.study_of(SPACE, trials, "max")
    assert [own.state for own in study.get_trials()] == [state for *_, state in states]
    assert study.best_value == 0.5


def test_any_sampler_of_optuna_by_its_class():
    pytest.importorskip("optuna")
    own = settings(sampler=Target("optuna.samplers.NSGAIISampler", {"population_size": 4}))
    assert len(set(swept(SPACE, 5, own))) == 5
    with pytest.raises(UserError, match=r"sweep.sampler: NSGAIISampler: .*unexpected keyword argument"):
        samplers.build(settings(sampler=Target("optuna.samplers.NSGAIISampler", {"no": 1})), SPACE)
    with pytest.raises(UserError, match=r"sweep.sampler._target_=os.getcwd: not among the packages"):
        samplers.build(settings(sampler=Target("os.getcwd", {})), SPACE)


def test_an_interval_needs_a_number_of_trials_and_no_grid():
    with pytest.raises(UserError, match=r"sweep.sampler=grid: lr, width is an interval"):
        samplers.build(settings(sampler="grid"), SPACE)
    with pytest.raises(UserError, match=r"sweep.trials=null: lr, width is an interval"):
        samplers.build(settings(trials=None), SPACE)


def test_a_storage_gets_each_trial_once(tmp_path):
    optuna = pytest.importorskip("optuna")
    url = f"sqlite:///{tmp_path}/study.db"
    facts = {"best_objective": 0.5}
    trials = [Trial(0, ("0.1", "8"), TrialState.FINISHED, facts=facts), Trial(1, ("0.2", "8"), TrialState.RUNNING)]
    samplers.copy_to_storage(url, "mine", SPACE, trials, "min")
    trials[1].state = TrialState.FINISHED
    trials[1].facts = {"best_objective": 0.25}
    samplers.copy_to_storage(url, "mine", SPACE, trials, "min")
    study = optuna.load_study(storage=url, study_name="mine")
    assert [own.value for own in study.trials] == [0.5, 0.25]
    assert study.best_params == {"lr": 0.2, "width": 8}
    with pytest.raises(UserError, match=r"sweep.storage=nonsense"):
        samplers.copy_to_storage("nonsense", "mine", SPACE, trials, "min")


def test_the_setting_that_matters_is_the_important_one():
    pytest.importorskip("optuna")
    values = swept(SPACE, 30, settings())
    trials = [Trial(n, v, TrialState.FINISHED, facts={"best_objective": quality(v)}) for n, v in enumerate(values)]
    found = samplers.importances(SPACE, trials, "max")
    assert found["lr"] > 3 * found["width"]
    assert samplers.importances(SPACE, trials[:1], "max") == {}
