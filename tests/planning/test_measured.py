"""Models that no trace can follow: their real steps are measured, and the estimate is within its margin."""

import measured
import pytest
import runs
import torch
from helpers import run_cli
from torch import nn

from trainapp.assembly.resolved_targets import resolve_targets
from trainapp.config import compose
from trainapp.memory.live_tensors import MemoryLimitExceeded
from trainapp.planning import planner, printed, process
from trainapp.planning.measured import MeasuredEstimator, _on_the_line
from trainapp.planning.recorder import Breakdown
from trainapp.planning.values import NeedsValues
from trainapp.units import bytes_text

OVER = (
    *runs.TINY, "every.eval=null", "checkpointing=off", "oom.grow=false", "data=digits",
    "batch.global_size=32", "batch.micro_size=16", "plan.techniques=false",
)  # fmt: skip


class Branches(nn.Module):
    """Computes more where the batch's mean is positive."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.first, self.last = nn.Linear(64, 4096), nn.Linear(64, num_classes)

    def forward(self, inputs):
        inputs = inputs.flatten(1)
        return self.last(inputs) + (self.first(inputs).relu().mean() if inputs.mean() > -1e9 else 0)


class Selects(Branches):
    """The shape of an activation depends on values."""

    def forward(self, inputs):
        flat = inputs.flatten(1)
        return self.last(flat) + self.first(flat[flat.mean(1) > 0]).relu().sum() / 1e6


class Converges(Branches):
    """A loop that ends where nothing changes any more."""

    def forward(self, inputs):
        state, inputs = self.first(inputs.flatten(1)), inputs.flatten(1)
        while float(state.detach().abs().amax()) > 0.1:
            state = state / 2
        return self.last(inputs) + state.mean()


class Recurrent(nn.Module):
    """An LSTM, whose workspace in oneDNN no fake kernel knows."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, num_classes)

    def forward(self, inputs):
        return self.head(self.lstm(inputs.squeeze(1))[0][:, -1])


class Huge(Branches):
    """Not even two samples fit into the share of memory that steps may use."""

    def forward(self, inputs):
        return super().forward(inputs) + torch.zeros(2**40 * len(inputs), dtype=torch.uint8)[0]


def own(kind):
    return (*OVER, *runs.own_model(f"test_measured.{kind.__name__}"), "user_packages=[test_measured]")


def plan(method, *overrides):
    return planner.plan(compose.from_command_line(overrides), method=method)[0]


@pytest.mark.parametrize("kind", [Branches, Selects, Converges, Recurrent])
def test_what_depends_on_values_is_measured(tmp_path, kind):
    with pytest.raises((NeedsValues, RuntimeError)):
        plan("traced", *own(kind))
    facts = plan("measured", *own(kind))
    assert (facts["method"], facts["margin"]) == ("measured", 0.1)
    assert facts["peak_bytes"] == pytest.approx(measured.peak(tmp_path / "run", *own(kind)), rel=0.1)


@pytest.mark.parametrize("setting", ["precision=int8", "train.compile=true"])
def test_what_no_trace_knows_is_not_traced(setting):
    with pytest.raises(NeedsValues):
        plan("traced", *OVER, *runs.MODELS["gpt"], setting)


@pytest.mark.slow
@pytest.mark.parametrize("model", runs.MODELS)
def test_a_measurement_is_what_a_run_measures(tmp_path, model):
    """Larger sizes, too: they are run, as long as a step takes no more than some seconds."""
    chosen = (*OVER, *runs.MODELS[model])
    assert plan("measured", *chosen)["peak_bytes"] == measured.peak(tmp_path / "run", *chosen)


@pytest.mark.slow
def test_a_size_that_would_take_too_long_is_on_the_line(tmp_path, monkeypatch):
    from trainapp.planning import measured as module

    monkeypatch.setattr(module, "LONGEST", 0.0)
    chosen = (*OVER, *runs.MODELS["gpt"], "model.context_length=32")
    facts = plan("measured", *chosen)
    assert facts["peak_bytes"] == pytest.approx(measured.peak(tmp_path / "run", *chosen), rel=0.1)


def test_each_phase_has_a_line_of_its_own():
    known = {
        2: Breakdown(100, "clip", phases={"forward": 20, "clip": 100}, categories={"parameters": 100}),
        8: Breakdown(110, "forward", phases={"forward": 110, "clip": 100}, seconds=1.0),
    }
    found = _on_the_line(16, known)
    assert (found.phases, found.phase, found.total) == ({"forward": 230, "clip": 100}, "forward", 230)
    assert found.seconds == 2.0
    assert _on_the_line(4, known).phases == {"forward": 50, "clip": 100}


def test_no_more_than_a_share_of_the_memory_is_used():
    config = compose.from_command_line(own(Huge))
    estimator = MeasuredEstimator(resolve_targets(config), 1, torch.device("cpu"))
    with pytest.raises((MemoryLimitExceeded, MemoryError, RuntimeError)):
        estimator.peak(config, 2)


@pytest.mark.slow
def test_one_rank_of_several_is_measured():
    chosen = (*OVER, *runs.MODELS["gpt"], "parallel=fsdp", "plan.world=2")
    facts, traced = plan("measured", *chosen), plan("traced", *chosen)
    assert facts["ranks"]["world"] == 2
    assert facts["peak_bytes"] == pytest.approx(traced["peak_bytes"], rel=0.1)


@pytest.mark.slow
def test_the_command_line_measures_what_it_cannot_trace(tmp_path):
    (tmp_path / "reads.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(64, num_classes)\n"
        "    def forward(self, inputs):\n"
        "        return self.linear(inputs.flatten(1)) * float(inputs.mean())\n"
    )
    user = ("model=mlp", "model._target_=reads.Net", "~model.width", "~model.depth", "~model.dropout")
    chosen = (*user, "user_packages=[reads]", "data=digits", "train.device=cpu", "plan.techniques=false")
    done = run_cli("mode=plan", *chosen, "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(measured, +-10%)" in done.stdout
    assert "not traced: NeedsValues: the model or its task reads the value of a tensor (forward)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("batch.micro_size=64")


@pytest.mark.slow
def test_what_cannot_be_measured_either_is_traced_with_made_up_answers(monkeypatch):
    """As a model that is too large for this machine: not refused, with a wide margin and a note."""

    def call_in_subprocess(function, config, picture, only_modes, method, **_):
        if method == "measured":
            raise process.NoAnswer("too large")
        try:
            return planner.plan_and_draw(config, picture, only_modes, method)
        except NeedsValues as error:
            raise process.NoAnswer(f"NeedsValues: {error}") from error

    monkeypatch.setattr(process, "call_in_subprocess", call_in_subprocess)
    facts = process.plan_in_subprocess(compose.from_command_line(own(Branches)))
    assert (facts["method"], facts["margin"]) == ("traced", 0.3)
    assert facts["notes"][0].startswith("not traced: NeedsValues")
    assert "made up" in facts["notes"][1]


@pytest.mark.slow
def test_plan_measure_runs_the_plan_and_its_first_techniques(tmp_path):
    gpt = (*runs.MODELS["gpt"], "model.dropout=0")
    chosen = (*runs.TINY, *gpt, "batch.global_size=16", "batch.micro_size=8", "every.eval=null")
    done = run_cli("mode=plan", *chosen, "plan.measure=true", "checkpointing=off", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "s per step" in done.stdout
    assert "measured     time  largest" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.endswith("activation_checkpointing=full"))
    assert " x " in row


def test_a_peak_within_the_margin_may_run():
    """On the old code: "no micro-batch fits", also of a limit above the peak."""
    overrides = (*OVER, *runs.MODELS["mlp"], "batch.global_size=1", "batch.micro_size=auto")

    def facts_with(limit):
        config = compose.from_command_line([*overrides, f"memory.limit={limit}"])
        return planner.plan(config, "measured")[0]

    peak = facts_with("1GiB")["peak_bytes"]
    config = compose.from_command_line(overrides)
    facts = facts_with(int(peak * 1.02))
    assert facts["largest_micro_size"] == 0
    text = printed.plan_text(facts, config)
    assert "no micro-batch is certain to fit" in text
    assert text.endswith("it may run, and mode=train tries it")
    assert printed.plan_text(facts_with(int(peak * 0.98)), config).endswith(
        f"no micro-batch fits {bytes_text(int(peak * 0.98))}"
    )

    # With techniques, of which the same holds.
    facts["best"] = {"overrides": "precision=bf16", "peak_bytes": peak, "missing_bytes": peak // 12, "result": "same"}
    *_, closest, _ = printed.plan_text(facts, config).splitlines()
    assert closest.startswith("nothing is certain to fit")
