"""Successive halving by pausing, on curves that are known: which trials pass a rung, and which pause."""

import pytest

from trainapp.config.schema import Sweep
from trainapp.sweep.journal import Trial
from trainapp.sweep.outcome import TrialState
from trainapp.sweep.pruner import Pruner


def pruner(**own):
    return Pruner(Sweep(**({"pruner": "halving"} | own)))


def trials_at(rung, *values):
    return [Trial(n, (str(n),), TrialState.PAUSED, rung_values={rung: value}) for n, value in enumerate(values)]


def simulated(own, curves, direction="max"):
    """A sweep with one slot. Returns the steps of each trial, of 27, and the finished ones."""
    trials, rungs = [Trial(number, (str(number),)) for number in range(len(curves))], own.rung_count
    begun, steps, finished = 0, [0] * len(curves), []
    while True:
        found = own.promotable(trials[:begun], direction, is_last=begun == len(curves))
        if found is not None:
            trial, rung = found
            trial.passed_rungs.add(rung)
        elif begun < len(curves):
            trial, begun = trials[begun], begun + 1
        else:
            return steps, finished
        trial.state = TrialState.RUNNING
        for rung, fraction in own.rungs(trial):
            trial.rung_values[rung] = curves[trial.number](fraction)
            steps[trial.number] = round(27 * fraction)
            if not own.passes(trial, rung, trials[:begun], direction):
                trial.state = TrialState.PAUSED
                break
            trial.passed_rungs.add(rung)
        else:
            trial.state = TrialState.FINISHED
            steps[trial.number] = 27
            finished.append(trial.number)
        assert rungs == own.rung_count


def test_rungs_are_at_powers_of_eta():
    assert pruner().rungs(Trial(0, ())) == [
        (0, pytest.approx(1 / 27)),
        (1, pytest.approx(1 / 9)),
        (2, pytest.approx(1 / 3)),
    ]
    assert pruner(eta=2, rungs=1).rungs(Trial(0, ())) == [(0, 0.5)]
    assert pruner().rungs(Trial(0, (), rung_values={0: 1.0, 1: 1.0})) == [(2, pytest.approx(1 / 3))]


def test_the_best_third_passes():
    own, six = pruner(), trials_at(0, 0.1, 0.9, 0.3, 0.5, 0.2, 0.8)
    assert own.promotable(six, "max")[0].number == 1
    six[1].passed_rungs.add(0)
    assert own.promotable(six, "max")[0].number == 5
    six[5].passed_rungs.add(0)
    assert own.promotable(six, "max") is None
    assert own.promotable(six, "min")[0].number == 0
    new = Trial(6, (), rung_values={0: 0.85})
    assert own.passes(new, 0, [*six, new], "max")
    assert not own.passes(new, 0, [*six, new], "min")


def test_nan_is_the_worst():
    own = pruner()
    assert own.promotable(trials_at(0, None, 0.3, None), "min")[0].number == 1


def test_the_best_is_found_with_a_fraction_of_the_steps_and_the_top_is_always_reached():
    curves = [
        lambda fraction, limit=limit: limit * fraction**0.2
        for limit in (0.3, 0.5, 0.9, 0.2, 0.7, 0.4, 0.6, 0.8, 0.1) * 3
    ]
    steps, finished = simulated(pruner(), curves)
    assert 2 in finished
    assert sum(steps) < 0.25 * 27 * len(curves)
    for count in (1, 2, 4, 8):  # too few for a third of each rung
        assert simulated(pruner(), curves[:count])[1]


def test_a_trial_that_falls_behind_at_first_is_promoted_when_others_are_worse():
    curves = [lambda fraction, limit=limit: limit for limit in (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)]
    steps, _ = simulated(pruner(), curves)
    assert steps[0] == 27  # it was the first, alone at its rung, and so paused at once
    assert steps[6] == 1


def test_hyperband_mixes_brackets():
    own = pruner(pruner="hyperband")
    first = [own.bracket(Trial(number, ())) for number in range(49)]
    assert [first.count(rung) for rung in range(4)] == [27, 12, 6, 4]
    assert len(set(first[:12])) == 4  # from the beginning
    curves = [lambda fraction, number=number: float(number) for number in range(49)]
    steps, finished = simulated(own, curves)
    assert {steps[n] for n in range(49) if first[n] == 3} == {27}
    assert all(steps[n] >= 3 for n in range(49) if first[n] == 1)
    assert len(finished) >= 4


def test_the_median_rule_waits_for_others():
    own = pruner(pruner="median")
    some = trials_at(0, 0.1, 0.2, 0.9, 0.8, 0.7)
    assert own.passes(some[0], 0, some[:3], "max")  # too few to say
    assert not own.passes(some[1], 0, some, "max")
    assert own.passes(some[3], 0, some, "max")
    assert own.promotable(some, "max") is None
