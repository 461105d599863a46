"""What cannot be traced as it is: built for real, probed, or planned from small steps that are run for real."""

import importlib
import json
import re

import pytest
import runs
import torch
from helpers import run_cli
from measured import by_part, own_model, peaks
from planned_models import masks
from torch import nn

from trainapp.config import compose
from trainapp.memory.live_tensors import LiveTensors
from trainapp.planning import planner, probes, process, real_steps, small_step
from trainapp.planning.values import MadeUpValues
from trainapp.torch_private import fake_tensor_mode, is_fake

OVER = (
    *runs.TINY, "every.eval=1", "checkpointing=off", "oom.grow=false", "data=digits",
    "batch.global_size=32", "batch.eval_micro_size=8", "batch.micro_size=16", "plan.levers=false",
)  # fmt: skip


class Converges(nn.Module):
    """A loop that ends where nothing changes any more."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)
        self.inner.weight.data.zero_()

    def forward(self, inputs):
        inputs = self.first(inputs.flatten(1))[:, None].repeat(1, 16, 1)
        state, change = torch.zeros_like(inputs), 1.0
        while change > 0.5:
            new = torch.tanh(self.inner(state) + inputs)
            change = (new - state).abs().amax().item() if change == 1.0 else 0.0
            state = new
        return self.last(state.mean(1))


class Huge(Converges):
    """Not even two samples fit into the share of memory that steps may use."""

    def forward(self, inputs):
        return super().forward(inputs) + torch.zeros(2**40 * len(inputs), dtype=torch.uint8)[0]


class Lazy(nn.Module):
    """Shapes from the data."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten())
        self.head = nn.LazyLinear(10)

    def forward(self, inputs):
        return self.head(self.layers(inputs))


class Half(nn.Module):
    """In bf16 when built, with two names for one weight and an LSTM, which keeps its weights in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(64, 10)
        self.second.weight = self.first.weight
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.bfloat16()

    def forward(self, inputs):
        hidden, _ = self.recurrent(self.second(self.first(inputs.squeeze(1).bfloat16())))
        return self.head(hidden.flatten(1)).float()


class Recurrent(nn.Module):
    """An LSTM, whose workspace in oneDNN no fake kernel knows."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, inputs):
        return self.head(self.lstm(inputs.squeeze(1))[0][:, -1])


class Notices(nn.Module):
    """Computes more on tensors without data."""

    looks = True

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 2048), nn.Linear(2048, 10)

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        return self.last(hidden.sigmoid().tanh() if self.looks and is_fake(inputs) else hidden)


class LooksAway(Notices):
    looks = False


class Counts(nn.Module):
    """Computes as often as a number says that it reads from its inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 2048), nn.Linear(2048, 10)

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        for _ in range(int((inputs.amax() * 0 + 16).item())):
            hidden = hidden.sigmoid()
        return self.last(hidden)


class Asks(Counts):
    """Reads, too, but only to choose one way or the other."""

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        return self.last(hidden.sigmoid() if inputs.amax().item() >= 0 else hidden)


class Fewer(Counts):
    """The larger the number that it reads, the less it computes."""

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        for _ in range(16 - int((inputs.amax() * 0 + 12).item())):
            hidden = hidden.sigmoid()
        return self.last(hidden)


class Fails(Asks):
    """In every real step, not in a trace."""

    def forward(self, inputs):
        if not is_fake(inputs):
            raise RuntimeError("no such kernel")
        return super().forward(inputs)


class Halts(Counts):
    """Until no row is left."""

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        left = torch.full((len(hidden),), 3.0)
        while len(rows := (left > 0).nonzero()[:, 0]):
            left = left.index_add(0, rows, -torch.ones(len(rows)))
        return self.last(hidden)


class Bins(Counts):
    """As many as the highest number says."""

    def forward(self, inputs):
        numbers = (inputs.flatten(1) * 0 + 4095).long().flatten()
        return self.last(self.first(inputs.flatten(1))) + (torch.bincount(numbers) * self.last.bias[:1]).mean()


class Bent(nn.Module):
    """Cannot be traced. Its backward needs the most at its end, for a large weight's gradient; with more samples at
    its beginning, for the activations.
    """

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 4096), nn.Linear(4096, 10)

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        for _ in range(8 + int(hidden.detach().numpy()[0, 0] > 1e9)):
            hidden = hidden.sigmoid()
        return self.last(hidden)


class Routed(nn.Module):
    """Each row goes to the best of four experts, which is always the first; or, with `last`, always the last."""

    last = False

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 512) for _ in range(4))
        self.head = nn.Linear(512, 10)

    def forward(self, inputs):
        inputs = inputs.flatten(1)
        scores = torch.arange(4.0 if self.last else -4.0, 0, -1 if self.last else 1).abs()
        chosen = scores.expand(len(inputs), 4).topk(1).indices
        total = inputs.new_zeros(len(inputs), 512)
        for number, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == number)
            total = total.index_add(0, rows, expert(inputs[rows]).relu())
        return self.head(total)


class RoutedToTheLast(Routed):
    last = True


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Overrides for a model of this file."""
    return lambda kind, *more: (*OVER, *own_model(monkeypatch, tmp_path, kind), *more)


def plan(overrides):
    return planner.plan(compose.from_command_line(list(overrides)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32])  # with and without accumulation
def test_an_estimate_from_small_real_steps_says_so_and_meets_the_run(tmp_path, own, size):
    overrides = own(Converges, f"batch.micro_size={size}")
    facts = plan(overrides)
    assert facts["certainty"] == "not traceable"
    assert "without end" in facts["reason"]
    assert facts["estimate"]["micro_sizes"] == ([2, 4, 8, 16, 32] if size == 16 else [2, 4, 8, 32])
    assert facts["estimate"]["memory_share"] == real_steps.MEMORY_SHARE
    assert any("run for real with micro-batches of 2, 4, 8" in note for note in facts["notes"])
    real = peaks(tmp_path, *overrides)
    assert by_part(facts) == pytest.approx(real, rel=0.01)
    assert facts["largest_micro_size"] == 32


@pytest.mark.slow
def test_an_estimate_gives_the_largest_micro_batch(own):
    overrides = own(Converges, "train.grad_clip=null")
    needed = plan([*overrides, "batch.micro_size=10"])["peak_bytes"]
    assert plan([*overrides, f"memory.limit={needed}"])["largest_micro_size"] == 10
    assert plan([*overrides, f"memory.limit={needed - 8}"])["largest_micro_size"] == 9


@pytest.mark.parametrize("size", [16, 32])
def test_a_bend_of_the_line_is_no_surprise(tmp_path, own, monkeypatch, size):
    """Without a step near the size that is asked for, the estimate is too low."""
    overrides = own(Bent, f"batch.micro_size={size}", "batch.eval_micro_size=32", "train.grad_clip=null")
    real = max(peaks(tmp_path, *overrides))
    facts = plan(overrides)
    assert "numpy" in facts["reason"]
    assert real <= facts["peak_bytes"] < 1.02 * real
    monkeypatch.setattr(real_steps, "LONGEST", 0.0)
    assert plan(overrides)["peak_bytes"] < 0.97 * real


def test_numbers_that_are_read_have_more_than_two_ways(tmp_path, own, monkeypatch):
    overrides = own(Counts)
    real = max(peaks(tmp_path, *overrides))
    facts = plan(overrides)
    assert facts["certainty"] == "not traceable"
    assert "depends on numbers that it reads: a step of 16 samples needs" in facts["reason"]
    assert facts["peak_bytes"] == pytest.approx(real, rel=0.02)
    monkeypatch.setattr(small_step, "beyond_ways", lambda *given: small_step.Compared("", 2**60, False))
    assert plan(overrides)["range_bytes"][1] < 0.9 * real


def test_a_number_that_saves_work_lowers_the_lower_end(tmp_path, own):
    overrides = own(Fewer)
    facts = plan(overrides)
    low, high = facts["range_bytes"]
    assert low <= max(peaks(tmp_path, *overrides)) < 0.8 * high
    assert any("a step of 16 samples, run for real, needs" in note for note in facts["notes"])


def test_where_no_step_is_small_enough_a_note_says_so(own, monkeypatch):
    monkeypatch.setattr(small_step, "MOST_BYTES", 1)
    facts = plan(own(Counts))
    assert facts["certainty"] == "range"
    assert any("no real step was compared with the trace, since none is small enough" in n for n in facts["notes"])


def test_a_real_step_that_fails_leaves_a_search_as_it_was(own):
    config = compose.from_command_line(list(own(Fails, "batch.micro_size=plan", "batch.eval_micro_size=auto")))
    facts, _ = planner.plan(config, only=("training", "evaluation"))
    assert facts["certainty"] == facts["eval_certainty"] == "range"
    assert facts["largest_micro_size"] == 32
    assert any("no such kernel" in note for note in facts["notes"])


def test_a_search_that_a_real_step_contradicts_is_made_of_real_steps(own):
    config = compose.from_command_line(list(own(Counts, "batch.micro_size=plan")))
    whole = planner.plan(config)[0]
    facts, _ = planner.plan(config, only=("training",))
    assert facts["certainty"] == "not traceable"
    margin = f"memory.limit={round((1 - real_steps.MARGIN) * facts['limit_bytes'])}"
    assert facts["largest_micro_size"] == plan(own(Counts, "batch.micro_size=auto", margin))["largest_micro_size"]
    assert facts["largest_peak_bytes"] == pytest.approx(by_part(whole)[0], rel=0.01)
    assert facts["peaks"][32] == facts["largest_peak_bytes"]  # not the trace's


def of_cache(name):
    """Overrides for such a model, and its plan from processes of its own."""
    masks.clear()
    stem = ("~model.norm", "~model.width", "~model.depth", "~model.stem")
    model = (f"model._target_=planned_models.{name}", "user_packages=[planned_models]", *stem)
    overrides = (*OVER, *model)
    return overrides, process.ask(compose.from_command_line(list(overrides)))


def test_a_cache_in_a_global_variable_is_no_reason_to_doubt(tmp_path):
    overrides, facts = of_cache("Caches")
    assert facts["certainty"] == "range"
    assert any("the model finds what it has kept from the trace" in note for note in facts["notes"])
    low, high = facts["range_bytes"]
    assert low <= max(peaks(tmp_path, *overrides)) <= high + 1024  # the cache's own tensors


def test_steps_that_would_meet_such_a_cache_run_in_another_process(tmp_path):
    overrides, facts = of_cache("CachesAndCounts")
    assert facts["certainty"] == "not traceable"
    assert "depends on numbers that it reads" in facts["reason"]
    assert facts["peak_bytes"] == pytest.approx(max(peaks(tmp_path, *overrides)), rel=0.02)


def test_a_loop_until_nothing_is_selected_has_an_end(tmp_path, own, monkeypatch):
    monkeypatch.setattr(MadeUpValues, "MOST_ASSUMED", 200)
    overrides = own(Halts)
    facts = plan(overrides)
    assert facts["certainty"] == "not traceable"
    assert "shapes depend on values without end" in facts["reason"]
    assert by_part(facts) == pytest.approx(peaks(tmp_path, *overrides), rel=0.01)


def test_bins_without_a_number_of_them_are_not_assumed(tmp_path, own):
    overrides = own(Bins)
    facts = plan(overrides)
    assert facts["certainty"] == "not traceable"
    assert "bincount" in facts["reason"]
    assert by_part(facts) == pytest.approx(peaks(tmp_path, *overrides), rel=0.01)


def test_one_of_two_ways_is_in_the_range(tmp_path, own):
    overrides = own(Asks)
    facts = plan(overrides)
    assert facts["certainty"] == "range"
    low, high = facts["range_bytes"]
    assert low <= max(peaks(tmp_path, *overrides)) <= high


@pytest.mark.slow
def test_steps_that_do_not_fit_their_share_of_memory_give_no_estimate(own):
    facts = plan(own(Huge))
    assert facts["certainty"] == "not traceable"
    assert "nor can small steps be run" in facts["reason"]
    assert "peak_bytes" not in facts


@pytest.mark.parametrize("kind", [Lazy, Half])
def test_models_that_no_fake_mode_builds_are_planned_exactly(tmp_path, own, kind):
    overrides = own(kind)
    facts = plan(overrides)
    assert facts["certainty"] == "exact"
    assert by_part(facts) == peaks(tmp_path, *overrides)


def test_an_lstm_is_probed_and_exact(tmp_path, own):
    overrides = own(Recurrent)
    facts = plan(overrides)
    assert facts["certainty"] == "probed"
    assert any("aten.mkldnn_rnn_layer" in note for note in facts["notes"])
    assert by_part(facts) == peaks(tmp_path, *overrides)


def recurrent_peaks(shape, settings):
    """Live bytes at most, of training with all three results used, and of evaluation."""
    lstm, inputs = nn.LSTM(24, 40, **settings), torch.zeros(shape)
    with LiveTensors() as training:
        output, (hidden, cell) = lstm(inputs)
        (output.sum() + hidden.sum() + cell.sum()).backward()
    lstm.eval()
    with torch.no_grad(), LiveTensors() as evaluation:
        lstm(inputs)
    return training.peak, evaluation.peak


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_layers", "dropout"), [(1, 0.0), (3, 0.0), (3, 0.3)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kind_of_lstm_is_exact(batch_first, bidirectional, num_layers, dropout, bias):
    kind = {"num_layers": num_layers, "dropout": dropout, "bias": bias}
    for shape in ((7, 20, 24), (65, 3, 24), (1, 1, 24)):  # steps and samples must not be taken for each other
        settings = (shape, kind | {"batch_first": batch_first, "bidirectional": bidirectional})
        real = recurrent_peaks(*settings)
        with fake_tensor_mode(), MadeUpValues():
            assert recurrent_peaks(*settings) == real


def workspace(steps, samples):
    data, weights = torch.zeros(steps, samples, 24), [torch.zeros(160, 24), torch.zeros(160, 40)]
    biases, states = [torch.zeros(160)] * 2, [torch.zeros(samples, 40)] * 2
    rest = (False, [], 2, 40, 1, True, False, False, True)
    return torch.ops.aten.mkldnn_rnn_layer(data, *weights, *biases, *states, *rest)[3].untyped_storage().nbytes()


@pytest.mark.parametrize(("steps", "samples"), [(1, 1), (7, 5), (64, 16), (128, 100)])
def test_the_workspace_is_the_real_one_or_close_where_it_is_extrapolated(monkeypatch, steps, samples):
    real = workspace(steps, samples)
    with fake_tensor_mode(), MadeUpValues():
        assert workspace(steps, samples) == real
    with fake_tensor_mode():
        assert workspace(steps, samples) == 0  # when this fails, torch knows, and the probe may go
    monkeypatch.setattr(probes, "LARGEST", 2**20)
    with fake_tensor_mode(), MadeUpValues():
        assert workspace(steps, samples) == pytest.approx(real, rel=0.03)


@pytest.mark.slow
def test_a_model_that_notices_the_trace_is_planned_from_real_steps(tmp_path, own):
    overrides = own(Notices, "plan.levers=true")
    facts = plan(overrides)
    assert facts["certainty"] == "not traceable"
    off = re.search(r"without data: in \w+, a step of 2 samples needs (\d+) bytes .*, (\d+) traced", facts["reason"])
    assert off is not None, facts["reason"]
    both = 2 * 2 * 2048 * 4  # bytes: of 2 samples the results of sigmoid and tanh
    assert int(off[2]) - int(off[1]) == pytest.approx(both, rel=0.01)
    assert "the levers are from the trace" in facts["notes"]
    assert {entry["certainty"] for entry in facts["levers"]} == {"range"}
    assert by_part(facts) == pytest.approx(peaks(tmp_path, *overrides), rel=0.01)


def test_a_model_that_does_the_same_is_exact(tmp_path, own):
    overrides = own(LooksAway)
    facts = plan(overrides)
    assert facts["certainty"] == "exact"
    assert by_part(facts) == peaks(tmp_path, *overrides)


def test_where_no_small_step_can_be_run_a_model_that_may_notice_is_no_certainty(monkeypatch, own):
    monkeypatch.setattr(small_step, "MOST_BYTES", 2**20)
    facts = plan(own(Notices))  # this file names is_fake and its like
    assert facts["certainty"] == "range"
    assert facts["range_bytes"] == [facts["peak_bytes"]] * 2
    assert any("no small step could be run to compare" in note for note in facts["notes"])
    monkeypatch.setattr(small_step, "look_for_fakes", lambda packages: [])
    assert plan(own(Notices))["certainty"] == "exact"


def test_an_operation_without_a_real_kernel_is_no_certainty(tmp_path):
    """In the plan's own precision, and of a lever: that is not offered as if it could be run."""
    group = tmp_path / "conf" / "model"
    group.mkdir(parents=True)
    (group / "own.yaml").write_text("_target_: planned_models.Antialiased\n")
    search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    overrides = (*runs.TINY, "user_packages=[planned_models]", "model=own", search, "data=digits", "memory.limit=10GiB")
    facts = plan((*overrides, "precision=bf16", "plan.levers=false"))
    assert facts["certainty"] == "range"
    assert any("not implemented for 'BFloat16'" in note for note in facts["notes"])
    facts = plan((*overrides, "plan.levers=true"))
    assert facts["certainty"] == "exact"
    by_name = {entry["overrides"]: entry for entry in facts["levers"]}
    assert not any(entry["peak_bytes"] for name, entry in by_name.items() if "precision=bf16" in name)
    assert by_name["optimizer=sgd"]["peak_bytes"]


def test_packages_that_look_for_fakes_are_found_by_their_source(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    for package, content in (("looks", "from torch._subclasses import FakeTensor"), ("does_not", "import torch")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("from . import inner\n")
        (tmp_path / package / "inner.py").write_text(content + "\n")
        importlib.import_module(package)
    assert small_step.look_for_fakes({"looks", "does_not", "absent"}) == ["looks"]


@pytest.mark.parametrize("kind", [Routed, RoutedToTheLast])
def test_routing_gives_a_range_from_equal_parts_to_one_choice(tmp_path, own, kind):
    overrides = own(kind, "train.grad_clip=null")
    facts = plan(overrides)
    assert facts["certainty"] == "range"
    assert "aten.nonzero" in str(facts["notes"])
    low, high = facts["range_bytes"]
    real = max(peaks(tmp_path, *overrides))
    assert low <= real <= high
    assert high < 1.6 * low  # four experts for all rows each would need more


@pytest.mark.slow
def test_a_process_that_dies_in_the_trace_is_followed_by_one_that_runs_steps(tmp_path):
    (tmp_path / "dies.py").write_text(
        "import os, torch\n"
        "from torch._subclasses.fake_tensor import FakeTensor\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(64, 10)\n"
        "    def forward(self, inputs):\n"
        "        if isinstance(inputs, FakeTensor):\n"
        "            os.abort()\n"
        "        return self.linear(inputs.flatten(1))\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/dies.yaml").write_text("_target_: dies.Net\n")
    user = ("--config-dir=.", "model=dies", "user_packages=[dies]", "data=digits", "train.device=cpu")
    done = run_cli(*user, "mode=plan", "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert facts["certainty"] == "not traceable"
    assert "signal 6" in facts["reason"]
    assert facts["peak_bytes"] > 0
    assert "not traceable: the planner's process ended with signal 6" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("batch.micro_size=")
