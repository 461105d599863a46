"""When no smaller micro-batch can help, the run stops within a few attempts; a run that could fit is never stopped."""

import pytest

from trainapp.errors import TrainingStopped
from trainapp.oom.incident import Incident
from trainapp.run import runner

from .conftest import tiny
from .inject import Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def attempts(monkeypatch) -> list[Incident]:
    """The incidents of all attempts, including the last one of a run that is stopped."""
    incidents, attempt = [], runner.attempt

    def noting(run):
        incident = attempt(run)
        if incident is not None:
            incidents.append((incident, (run.sizes.evaluation if incident.evaluating else run.sizes.train).size))
        return incident

    monkeypatch.setattr(runner, "attempt", noting)
    return incidents


def own(model: str, **arguments: int) -> tuple[str, ...]:
    """A run of a model in `own_models`, 256 samples per step."""
    return (
        "model=mlp",
        "~model.width",
        "~model.depth",
        "~model.dropout",
        f"model._target_=own_models.{model}",
        *(f"+model.{name}={value}" for name, value in arguments.items()),
        "user_packages=[own_models]",
        "data=digits",
        "optimizer=sgd",
        "train.ema=null",
        "batch.micro_size=auto",
        "batch.global_size=256",
        "train.max_steps=2",
        "every.log=null",
    )


@pytest.mark.slow
def test_an_allocation_that_does_not_shrink_stops_the_run_early(tmp_path, attempts):
    config = tiny(tmp_path, *own("Scratch", scratch=100_000), changes={"memory.limit": 300_000})
    with pytest.raises(TrainingStopped) as stopped:
        Recorded(config)
    assert [size for _, size in attempts] == [256, 128, 64]
    assert {incident.requested for incident, _ in attempts} == {400_000}
    assert "micro-batch 64: a smaller one cannot help" in str(stopped.value)
    assert "tried to allocate 390.6 KiB" in str(stopped.value)


def test_so_does_one_in_evaluation(tmp_path, attempts):
    changes = {"memory.limit": 300_000, "batch.eval_micro_size": 128, "every.eval": 2}
    config = tiny(tmp_path, *own("ScratchInEvaluation", scratch=100_000), changes=changes)
    with pytest.raises(TrainingStopped):
        Recorded(config)
    assert [(incident.phase, size) for incident, size in attempts] == [("evaluate", n) for n in (128, 64, 32)]


def test_the_scratch_buffer_alone_would_fit(tmp_path, attempts):
    """Under a limit that leaves enough room, smaller micro-batches do help: the run is not stopped."""
    config = tiny(tmp_path, *own("Scratch", scratch=100_000), changes={"memory.limit": 430_000})
    recorded = Recorded(config)
    assert recorded.run.state.progress.step == 2
    assert [size for _, size in attempts] == [256, 128]
    assert len({incident.requested for incident, _ in attempts}) == 1


def test_a_coincidence_does_not_stop_a_run_that_fits(tmp_path, attempts):
    """The first layer fails at 256 and the second at 128, both asking for the same bytes; 64 fits."""
    width = 1000
    config = tiny(tmp_path, *own("Widening", width=width), changes={"memory.limit": 4 * 200 * width})
    recorded = Recorded(config)
    assert [(size, incident.requested) for incident, size in attempts] == [(256, 1_024_000), (128, 1_024_000)]
    assert recorded.run.sizes.train.size == 64
    assert recorded.run.state.progress.step == 2
