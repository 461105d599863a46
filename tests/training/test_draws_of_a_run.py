"""`train.draws=per_sample`: a run that draws random numbers has the same losses, gradients and evaluations however its
batches are cut, where torch's own draws (`device`) change the second digit.
"""

import helpers
import pytest
import runs
import torch
import writing_models

from trainapp.assembly import engine
from trainapp.errors import UserError
from trainapp.files import json_object
from trainapp.training import loop

BY_SAMPLE, OF_TORCH = "train.draws=per_sample", "train.draws=device"
SIZES = (16, 7, 1)


def of(name, *extra):
    """The overrides of a run with a model of `own_draws`."""
    own = runs.own_model(f"own_draws.{name}")
    return (*runs.STEPS_ONLY, *own, "data=digits", "user_packages=[own_draws]", "task=own_draws.task", *extra)


def step(folder, *overrides):
    """The mean loss and the gradient of the first step."""
    session = runs.closed(folder, *overrides)
    session.snapshot.take()  # as a transaction does
    session.engine.seed(session.begin_update())
    totals = runs.accumulate(session)
    return totals.means()["loss"], runs.gradients(session.state.model), session


def differences(folder, *overrides, sizes=SIZES, first=()):
    """The largest relative differences of loss and gradient from those of the first size."""
    loss, gradient, session = step(folder / "whole", *overrides, *first, f"batch.micro_size={sizes[0]}")
    found = [step(folder / str(size), *overrides, f"batch.micro_size={size}") for size in sizes[1:]]
    largest = max(abs(other - loss) / abs(loss) for other, _, _ in found)
    return largest, max(runs.relative_error(other, gradient) for _, other, _ in found), session.engine.draw_record


MODELS = ["TimeFirst", "Diffusion"]  # the samples second, and first
MODELS += [pytest.param(name, marks=pytest.mark.slow) for name in ("Transformer", "Depth", "VAE")]


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_do_not_depend_on_the_micro_batch(tmp_path, name):
    loss, gradient, draw_record = differences(tmp_path / "own", *of(name), BY_SAMPLE)
    assert loss < 1e-6
    assert gradient < 1e-5
    assert draw_record.draws
    assert not draw_record.depends
    loss, gradient, _ = differences(tmp_path / "torchs", *of(name), OF_TORCH)
    assert loss > 1e-4
    assert gradient > 1e-2


GRAPH = (*runs.own_model("own_graphs.GraphNet"), "data=digits", "user_packages=[own_graphs]", "task=own_graphs.total")


@pytest.mark.parametrize("layout", ["coo", pytest.param("csr", marks=pytest.mark.slow)])
def test_those_of_a_graph_network_with_a_sparse_matrix_do_not(tmp_path, layout):
    """Its draws have the nodes first, and the samples second."""
    graph = (*runs.STEPS_ONLY, *GRAPH, f"+model.layout={layout}")
    loss, gradient, draw_record = differences(tmp_path / "own", *graph, BY_SAMPLE)
    assert max(loss, gradient) < 1e-5
    assert not draw_record.depends
    assert differences(tmp_path / "torchs", *graph, OF_TORCH)[0] > 1e-4


@pytest.mark.slow
def test_an_out_of_memory_error_changes_nothing_in_a_graph_network(tmp_path):
    settings = (*GRAPH, BY_SAMPLE, "every.eval=2", "train.max_steps=2", "batch.global_size=256")
    runs.run(tmp_path / "free", *settings, "batch.micro_size=256", "batch.eval_micro_size=360")
    runs.run(tmp_path / "limited", *settings, "memory.limit=1MiB")
    assert helpers.incidents(tmp_path / "limited")
    logged = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("free", "limited")]
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)


@pytest.mark.parametrize("name", [pytest.param("VAE", marks=pytest.mark.slow), "Diffusion"])
def test_evaluations_do_not_depend_on_the_micro_batch(tmp_path, name):
    """Nor does a second evaluation of the same weights differ from the first."""

    def evaluated(draws, size):
        folder, sizes = tmp_path / f"{draws} {size}", (f"batch.eval_micro_size={size}", "batch.micro_size=16")
        settings = (*of(name), draws, "every.eval=1", "train.max_steps=1", *sizes)
        runs.run(folder, *settings)
        (line,) = helpers.evaluations(folder)
        return [line["loss"], line["first"]]

    whole = evaluated(BY_SAMPLE, 360)
    for size in (128, 16, 7):
        assert evaluated(BY_SAMPLE, size) == pytest.approx(whole, rel=1e-5)
    assert evaluated(OF_TORCH, 7) != pytest.approx(evaluated(OF_TORCH, 360), rel=1e-3)


@pytest.mark.parametrize("mode", ["none", "full", "selective", "torch's"])
def test_a_checkpointed_model_draws_the_same(tmp_path, mode):
    recomputed = "+model.checkpointed=true" if mode == "torch's" else f"activation_checkpointing={mode}"
    plain = step(tmp_path / "plain", *of("Transformer"), BY_SAMPLE, "batch.micro_size=16")
    other = step(tmp_path / "other", *of("Transformer"), BY_SAMPLE, recomputed, "batch.micro_size=7")
    assert other[0] == pytest.approx(plain[0], rel=1e-6)
    assert runs.relative_error(other[1], plain[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.nightly)])
def test_a_compiled_model_draws_the_same(tmp_path, monkeypatch, mode):
    """For each size, and as the plain model, which the first steps run; not with inductor's own random numbers."""
    torch.compiler.reset()
    settings = (*of("Transformer"), BY_SAMPLE, "train.max_steps=6", "optimizer.lr=0.01")

    def losses(name, *more):
        runs.run(tmp_path / name, *settings, *more)
        return [line["loss"] for line in helpers.metrics(tmp_path / name) if "grad_norm" in line]

    plain = losses("plain", "batch.micro_size=16")
    compiled = ("train.compile=true", f"activation_checkpointing={mode}")
    assert losses("compiled", *compiled, "batch.micro_size=7") == pytest.approx(plain, rel=1e-4)
    monkeypatch.setattr(engine, "draw_as_uncompiled", lambda on: None)
    monkeypatch.setattr(torch._inductor.config, "fallback_random", False)
    torch.compiler.reset()
    assert losses("inductor", *compiled, "batch.micro_size=16") != pytest.approx(plain, rel=1e-3)


def test_steps_updates_and_seeds_draw_different_numbers(tmp_path):
    """Of the same samples and weights, as with a learning rate of almost 0."""
    settings = (*of("Diffusion"), BY_SAMPLE, "batch.global_size=1437", "batch.micro_size=600", "train.grad_clip=null")
    runs.run(tmp_path / "run", *settings, "optimizer.lr=1e-12", "train.max_steps=2", "every.log=1", "schedule=constant")
    first, second = (line["loss"] for line in helpers.metrics(tmp_path / "run") if "loss" in line)
    assert first != pytest.approx(second, rel=1e-5)
    other = step(tmp_path / "seed", *settings, "train.seed=1")[0]
    assert other != pytest.approx(first, rel=1e-5)


def test_an_out_of_memory_error_changes_nothing(tmp_path):
    """A limit that the first size exceeds, in training and in evaluation."""
    settings = (*of("Transformer"), BY_SAMPLE, "every.eval=2", "train.max_steps=2", "batch.global_size=256")
    runs.run(tmp_path / "free", *settings, "batch.micro_size=256", "batch.eval_micro_size=360")
    runs.run(tmp_path / "limited", *settings, "memory.limit=700KiB")
    assert helpers.incidents(tmp_path / "limited")
    (free,), (limited,) = (helpers.evaluations(tmp_path / name) for name in ("free", "limited"))
    assert limited["loss"] == pytest.approx(free["loss"], rel=1e-5)
    assert [line["loss"] for line in helpers.metrics(tmp_path / "limited") if "grad_norm" in line] == pytest.approx(
        [line["loss"] for line in helpers.metrics(tmp_path / "free") if "grad_norm" in line], rel=1e-5
    )


@pytest.mark.parametrize("task", ["contrasted", pytest.param("labelled", marks=pytest.mark.slow)])
def test_embeddings_are_drawn_by_sample(tmp_path, task):
    """Pass 3 of cached gradients draws what pass 1 drew."""
    settings = (*of("Transformer")[:-1], f"task=own_draws.{task}", "objective=min loss")
    loss, gradient, _ = differences(tmp_path / "own", *settings, BY_SAMPLE)
    assert max(loss, gradient) < 1e-5
    assert differences(tmp_path / "torchs", *settings, OF_TORCH)[1] > 1e-2


def test_a_resumed_run_draws_as_it_would_have(tmp_path):
    """By the record in its checkpoint; another way of drawing is refused, and an older checkpoint has torch's own."""
    settings = (*of("TimeFirst")[len(runs.STEPS_ONLY) :], BY_SAMPLE, "every.save=2", "train.max_steps=4")
    whole, parts = runs.resumed(tmp_path, 2, *settings, "batch.micro_size=7")
    assert not runs.differences(whole, parts)
    session = runs.closed(tmp_path / "parts", *settings, "train.max_steps=6")
    layout = session.engine.draw_record.layouts["train "][0]
    assert layout.axis == 1 or layout.rows > 1
    with pytest.raises(UserError, match=r"train.draws=device: the run in .* has draws per_sample"):
        runs.closed(tmp_path / "parts", *settings, OF_TORCH)


def test_what_depends_on_the_micro_batch_is_reported(tmp_path, caplog):
    settings = (*of("Diffusion"), "batch.micro_size=7")
    with caplog.at_level("WARNING"):
        found = runs.run(tmp_path / "torchs", *settings, OF_TORCH)
    assert found.draws == "device"
    (text,) = found.depends_on_micro_batch
    assert "are those of the micro-batch (7)" in text
    assert text in caplog.text
    assert helpers.result(tmp_path / "torchs")["depends_on_micro_batch"] == [text]
    found = runs.run(tmp_path / "own", *settings, BY_SAMPLE)
    assert (found.draws, found.depends_on_micro_batch) == ("per_sample", [])
    found = runs.run(tmp_path / "none", *runs.STEPS_ONLY, *runs.MODELS["mlp"], "model.dropout=0", BY_SAMPLE)
    assert (found.draws, found.depends_on_micro_batch) == ("none", [])


def test_checks_that_differ_about_the_loss_say_how(tmp_path):
    """The second view's noise is in reverse order, which no layout has: with draws of their own, none adds up."""
    checks = runs.closed(tmp_path, *of("Reversed")).checks
    assert checks["loss in training"].startswith("adds up over 4 samples that all draw the same, as do")
    assert checks["loss"].startswith("adds up over 4 samples")
    wrong = "but some perhaps to the wrong ones: with each sample's own draws the loss does not add up"
    assert checks["draws in training"] == f"all belong to samples, {wrong}"


def test_of_a_single_sample_nothing_depends_on_the_micro_batch(tmp_path):
    """It cannot be cut, whatever its forward draws."""
    graph = ("data._target_=own_draws.Graph", "model._target_=own_draws.Nodes", "task=own_draws.of_nodes")
    settings = (*runs.STEPS_ONLY, *graph, "user_packages=[own_draws]", "batch.global_size=1", BY_SAMPLE)
    assert not runs.run(tmp_path, *settings).depends_on_micro_batch


CARRIES = ("task=writing_models.Carries", "objective=min loss", "train.check_loss=false")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (runs.own_model("writing_models.Teacher"), "model.teacher.bias, model.teacher.weight, once"),
        (runs.own_model("writing_models.ExtraState"), "model.calls, model.extra_state, model.means, once"),
        ((*runs.own_model("writing_models.Carrying"), *CARRIES), "model.states, task.history, task.states, once"),
        (runs.own_model("writing_models.SpectralNorm"), "model.linear.parametrizations.weight.0._u,"),
    ],
)
def test_what_a_forward_writes_is_named(tmp_path, caplog, model, names):
    settings = (*runs.STEPS_ONLY, *model, "data=digits", "user_packages=[writing_models]", BY_SAMPLE)
    with caplog.at_level("WARNING"):
        (text,) = runs.run(tmp_path / "cut", *settings, "batch.micro_size=7").depends_on_micro_batch
    assert f"the forward writes {names}" in text
    assert caplog.text.count(text) == 1
    assert "GroupNorm" not in text
    assert not runs.run(tmp_path / "whole", *settings, "batch.micro_size=16").depends_on_micro_batch


def test_a_teacher_and_a_queue_are_both_named_on_the_terminal(tmp_path, caplog):
    """Writes through `data` are found one step later, and a teacher's parameters do not fill the list."""
    model = runs.own_model("writing_models.QueueBeside")
    settings = (*runs.STEPS_ONLY, *model, "data=digits", "user_packages=[writing_models]", "batch.micro_size=7")
    with caplog.at_level("WARNING"):
        (text,) = runs.run(tmp_path, *settings).depends_on_micro_batch
    assert text.startswith(
        "the forward writes model.encoder.0.bias, model.queue, model.encoder.0.weight and 2 more, once"
    )
    assert caplog.text.count(text) == 1


def test_what_batchnorm_depends_on_is_said(tmp_path, caplog):
    """Not only statistics that it writes: gradients, too, are those of a micro-batch."""
    settings = (*runs.STEPS_ONLY, *runs.MODELS["resnet"], "data.augment=false")
    with caplog.at_level("WARNING"):
        (text,) = runs.run(tmp_path / "cut", *settings, "batch.micro_size=7").depends_on_micro_batch
    assert text == (
        "in training, BatchNorm normalises each micro-batch (7) by its own mean and variance, so outputs, gradients "
        "and running statistics depend on the size of the micro-batch; GroupNorm (model.norm=group) does not"
    )
    assert caplog.text.count(text) == 1
    assert not runs.run(tmp_path / "whole", *settings, "batch.micro_size=16").depends_on_micro_batch
    assert json_object(tmp_path / "whole/recipe.json")["batchnorm_layers"] == 20

    def gradients(norm: str, size: int) -> torch.Tensor:
        session = runs.closed(tmp_path / f"{norm} {size}", *settings, f"model.norm={norm}", f"batch.micro_size={size}")
        runs.accumulate(session)
        return runs.gradients(session.state.model)

    for norm, depends in (("batch", True), ("group", False)):
        assert (runs.relative_error(gradients(norm, 4), gradients(norm, 16)) > 1e-4) == depends


def test_a_frozen_batchnorm_is_not_named_for_what_another_module_writes(tmp_path):
    model = runs.own_model("own_models.FrozenNorm")
    settings = (*runs.STEPS_ONLY, *model, "data=digits", "user_packages=[own_models]", "batch.micro_size=7")
    (text,) = runs.run(tmp_path, *settings).depends_on_micro_batch
    assert text.startswith("the forward writes model.seen, once per micro-batch (7)")
    assert "BatchNorm" not in text


@pytest.mark.parametrize(("model", "is_named"), [("Anneals", True), ("AnnealsInTraining", False)])
def test_what_evaluations_write_is_named(tmp_path, model, is_named):
    settings = (*runs.own_model(f"writing_models.{model}"), "data=digits", "user_packages=[writing_models]")
    result = runs.run(tmp_path, *settings, "train.max_steps=2", "every.eval=2", "batch.eval_micro_size=50")
    start = "the forward writes model.num_iter in evaluations, too, once per micro-batch ("
    assert any(text.startswith(start) for text in result.depends_on_micro_batch) == is_named


def test_draws_that_an_evaluation_begins_with_later_are_named_with_it(tmp_path):
    """The trial's first forward draws nothing, so that nothing is known of them."""
    settings = (*runs.own_model("writing_models.Generating"), "data=digits", "user_packages=[writing_models]")
    result = runs.run(tmp_path, *settings, "train.max_steps=2", "every.eval=1", "batch.eval_micro_size=50")
    start = "bernoulli_ of [50, 64] in evaluation: none of its dimensions is known to be that of the samples"
    assert any(text.startswith(start) for text in result.depends_on_micro_batch)


@pytest.mark.parametrize(
    ("model", "named"),
    [("RemembersInEvaluation", "queue.features"), ("RemembersATensor", "queue.latest"), ("LeavesAResult", "")],
)
@pytest.mark.parametrize("steps", [2, 6])  # at the second, what changes is still compared by fingerprints
def test_state_of_objects_that_evaluations_carry_on_is_named(tmp_path, model, named, steps):
    """And no result that a forward leaves for others to read."""
    settings = (*runs.own_model(f"writing_models.{model}"), "data=digits", "user_packages=[writing_models]")
    evaluations = (f"train.max_steps={steps}", f"every.eval={steps}", "batch.eval_micro_size=50")
    result = runs.run(tmp_path, *settings, *evaluations, "train.check_loss=false")
    start = f"the forward writes model.{named} in evaluations, too, once per micro-batch (50)"
    assert any(text.startswith(start) for text in result.depends_on_micro_batch) == bool(named)
    assert bool(named) or not any("in evaluations, too" in text for text in result.depends_on_micro_batch)


@pytest.mark.parametrize("size", [40, 16])
def test_state_that_is_read_late_in_an_evaluation_is_named(tmp_path, size):
    """Not by the second micro-batch, whose samples are too few."""
    settings = (*runs.own_model("writing_models.ReadsALongQueue"), "data=digits", "user_packages=[writing_models]")
    evaluations = ("train.max_steps=2", "every.eval=2", f"batch.eval_micro_size={size}")
    result = runs.run(tmp_path, *settings, *evaluations)
    start = f"the forward writes model.queue.features in evaluations, too, once per micro-batch ({size})"
    assert any(text.startswith(start) for text in result.depends_on_micro_batch)


@pytest.mark.parametrize(("model", "name"), [("Slope", "model.act.negative_slope"), ("LateScale", "model.scale")])
def test_numbers_of_torchs_layers_and_what_a_later_stage_writes_are_named(tmp_path, model, name):
    settings = (*runs.own_model(f"writing_models.{model}"), "data=digits", "user_packages=[writing_models]")
    steps = ("train.max_steps=5", "train.check_loss=false", "batch.global_size=64", "batch.micro_size=16")
    result = runs.run(tmp_path, *settings, *steps, "every.eval=null")
    assert any(name in text and "once per micro-batch (16)" in text for text in result.depends_on_micro_batch)


def test_a_buffer_that_is_filled_with_a_graph_is_named(tmp_path):
    settings = (*runs.own_model("writing_models.Normalises"), "data=digits", "user_packages=[writing_models]")
    (text,) = runs.run(tmp_path, *runs.STEPS_ONLY, *settings, "batch.micro_size=4").depends_on_micro_batch
    assert text.startswith("the forward writes model.constant, once per micro-batch (4)")


def test_draws_that_the_check_could_not_see_are_told_also_if_the_batch_is_whole(tmp_path, caplog):
    """The check has four samples, and draws begin to be cut at nine."""
    settings = (*runs.own_model("writing_models.InChunks"), "data=digits", "user_packages=[writing_models]", BY_SAMPLE)
    depends = runs.run(tmp_path, *runs.STEPS_ONLY, *settings, "batch.micro_size=16").depends_on_micro_batch
    warnings = [record.getMessage() for record in caplog.records if "the check before the first step" in record.message]
    assert len(depends) >= 1
    assert any(text.startswith("step 1: uniform_ of [8, 1]: none of its dimensions") for text in warnings)


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_buffer_that_is_declared_per_sample_is_not_named(tmp_path, monkeypatch, is_declared):
    """And no other buffer is left out for it."""
    if not is_declared:  # the negative control
        monkeypatch.delattr(writing_models.Recurrent, "per_sample_buffers")
    own = (*runs.own_model("writing_models.Declares"), "data=digits", "user_packages=[writing_models]")
    found = runs.run(tmp_path, *runs.STEPS_ONLY, *own, BY_SAMPLE, "batch.micro_size=4")
    (text,) = found.depends_on_micro_batch
    hidden = "" if is_declared else "model.state.hidden, "
    assert f"the forward writes {hidden}model.state.largest, once per micro-batch (4)" in text


def test_a_tuple_that_is_declared_per_sample_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setattr(writing_models.Carrying, "per_sample_buffers", ["states"], raising=False)
    own = (*runs.own_model("writing_models.Carrying"), "data=digits", "user_packages=[writing_models]")
    settings = (*runs.STEPS_ONLY, *own, "train.check_loss=false", BY_SAMPLE, "batch.micro_size=7")
    assert not runs.run(tmp_path, *settings).depends_on_micro_batch


def test_shared_draws_are_named_once(tmp_path, caplog):
    assert max(differences(tmp_path, *of("Shared"), BY_SAMPLE)[:2]) < 1e-5
    with caplog.at_level("INFO"):
        runs.run(tmp_path / "run", *of("Shared"), BY_SAMPLE, "batch.micro_size=4")
    assert caplog.text.count("drawn once per step, for all samples, since no dimension has their number: uniform_") == 1


def test_shared_draws_name_their_module(tmp_path, caplog):
    """Which a checkpoint does not hold."""
    settings = (*of("SharedByALayer"), BY_SAMPLE, "batch.micro_size=4")
    with caplog.at_level("INFO"):
        runs.run(tmp_path, *settings, "train.max_steps=2", "checkpointing=standard")
    assert "since no dimension has their number: uniform_ in noise\n" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        runs.run(tmp_path, *settings, "train.max_steps=3", "checkpointing=standard")
    assert "since no dimension has their number: uniform_\n" in caplog.text


def test_the_generator_is_restored_after_each_micro_batch(tmp_path):
    session = runs.closed(tmp_path, *of("Diffusion"), BY_SAMPLE, "batch.micro_size=4")
    session.engine.begin(session.begin_update())
    before = torch.default_generator.get_state()
    loop.accumulate(session.engine, iter(list(session.micro_batches())), lambda micro: torch.enable_grad())
    assert torch.equal(torch.default_generator.get_state(), before)
