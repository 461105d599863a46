"""What depends on the micro-batch although nothing should: found while training, and said once."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from trainapp.draws.record import GLOBALS, ITERATORS, TopicKind, shown_name
from trainapp.errors import TrainingStopped
from trainapp.losses.losses import has_embeddings, needs_whole_batch, unchecked
from trainapp.models.inspect import batchnorms, batchnorms_of_task, instead_of_batchnorm, per_sample_buffers
from trainapp.state.checksum import checksum
from trainapp.state.contents import MOST_BYTES
from trainapp.state.held import MOST_COPIED_ITEMS
from trainapp.torch_private import is_shard
from trainapp.training.phase import UpdateContext
from trainapp.training.session import Session
from trainapp.units import bytes_text, listed

WRITES = "writes"  # the topic of state that forwards write


def warn_of_trials(session: Session) -> None:
    """Warn before the first step of what trial calls have found: results that depend on the padding, gradients that do
    not add up, global variables that a forward writes, iterators that it advances, and, of a run that continues, a loss
    that is no sum any more. The recipe says the rest.
    """
    kinds_of_task = (TopicKind.PADDING, TopicKind.GRADIENTS, TopicKind.LATER_SUM)
    for topic, text in session.engine.draw_record.depends.items():
        is_of_task = any(kind.includes(topic) for kind in kinds_of_task)
        if topic in (GLOBALS, ITERATORS) or is_of_task:
            session.tracker.warn_once(text, topic=topic)


def warn_of_dependence(session: Session, context: UpdateContext) -> None:
    """Warn once of what depends on the micro-batch, if steps are split into several, on one rank or over many.
    Collective.
    """
    sizes = session.sizes.train
    size = max(sizes.schedule.in_force.values(), default=sizes.size)
    is_cut_here = session.batches.accumulation(size) > 1
    if is_cut_here or session.ranks.world_size > 1:
        record = session.engine.draw_record
        kinds_of_state = _record_writes(session, size, is_cut_here)
        if record.draws and not session.engine.draws_by_sample:
            record.depends["draws"] = (
                f"the forward draws torch's own random numbers, which are those of the micro-batch ({size}); with "
                "train.draws=per_sample (not on mps) they do not depend on it"
            )
        for topic, text in record.depends.items():
            # State that a later step is the first to write, or to be seen by a checksum, is said, too.
            once = f"{topic} of {kinds_of_state}" if topic == WRITES else topic
            session.tracker.warn_once(f"step {context.step_number}: {text}", topic=once)
    _warn_of_other_draws(session, context)
    _report_shared_draws(session)
    _warn_of_what_is_not_restored(session, context)


def _warn_of_other_draws(session: Session, context: UpdateContext) -> None:
    """Warn once of draws that do not belong to samples where trial calls, of a few samples, have found none such: the
    recipe says otherwise. Also where the micro-batch is the whole batch, since another limit may split it, unless the
    task declares that it never is.
    """
    if needs_whole_batch(session.engine.task):
        return
    for topic, text in session.engine.draw_record.depends.items():
        if TopicKind.DRAWS.includes(topic) and topic not in session.topics_of_trials:
            session.tracker.warn_once(
                f"step {context.step_number}: {text}; so the draws depend on the micro-batch, which the few samples of "
                "the check before the first step did not show",
                topic=topic,
            )


def batchnorms_of_micro_batches(session: Session) -> dict[str, nn.Module]:
    """Return the BatchNorm layers that see a micro-batch in training, of the model and of the trained tasks, by their
    full names: of an embedding loss those that its `embed` calls.
    """
    model = session.state.model
    layers = {f"model.{path}": model.get_submodule(path) for path in batchnorms(model)}
    trained_tasks = {id(unchecked(task)) for task in (session.engine.tasks.values() or [session.task])}
    stateful = session.state.stateful
    for root_name, task in stateful.tasks().items():
        if id(task) not in trained_tasks:
            continue
        for path, layer in batchnorms_of_task(stateful, root_name).items():
            if not has_embeddings(task) or path in session.engine.draw_record.batchnorms_of_embed:
                layers[f"{root_name}.{path}"] = layer
    return layers


def known_dependence(session: Session) -> list[str]:
    """Return what is known to depend on the micro-batch. Nothing does where the batch is one sample, which cannot be
    split; nor do draws where the task declares that it never is.
    """
    if session.config.batch.global_size == 1:
        return []
    is_never_split = not session.config.updates and needs_whole_batch(session.task)
    texts = []
    for topic, text in session.engine.draw_record.depends.items():
        if not (is_never_split and TopicKind.DRAWS.includes(topic)):
            texts.append(text)
    return texts


def warn_of_writes_in_evaluation(session: Session, names: Collection[str], samples: int) -> None:
    """Warn once of state that the forwards of an evaluation write, each of its micro-batches anew.

    Args:
        session: the live objects; their record of draws is extended.
        names: what is written.
        samples: in a micro-batch.
    """
    modules = {"model": session.state.model, **session.state.stateful.modules}
    state = set(names) - per_sample_buffers(modules) - _bounded_embeddings(modules)
    if not state:
        return
    topic = "writes in evaluation"
    names_text = listed(_kinds_first(state))
    text = (
        f"the forward writes {names_text} in evaluations, too, once per micro-batch ({samples}): what a "
        "forward reads of them depends on batch.eval_micro_size; write them in training mode only (self.training)"
    )
    session.engine.draw_record.note(topic, text)
    session.tracker.warn_once(text, topic=topic)


def _warn_of_what_is_not_restored(session: Session, context: UpdateContext) -> None:
    """Say once which containers and objects a retry cannot restore."""
    names = session.snapshot.not_restored()
    if names:
        session.tracker.warn_once(
            f"step {context.step_number}: the forward writes {listed(names)}, too large to be copied in every step "
            f"(together more than {MOST_COPIED_ITEMS:,} items, or {bytes_text(MOST_BYTES)} of tensors and arrays): a "
            "step that is retried after an out-of-memory error finds there what its failed attempt has written; keep "
            "less in it, or keep it in a buffer of the model",
            topic="not restored",
        )
    iterators = session.snapshot.advanced_iterators()
    if iterators:
        session.tracker.warn_once(f"step {context.step_number}: {iterators_text(iterators)}", topic=ITERATORS)


def iterators_text(names: Collection[str]) -> str:
    """Return the message about iterators that a forward advances, by their names."""
    return (
        f"the forward takes items from {listed(sorted(names))}, an iterator, once per micro-batch, and nothing can put "
        "them back: the check of the loss before the first step takes some, a step that is retried after an "
        "out-of-memory error gets others than its failed attempt, and a resumed run begins anew; make what it yields "
        "part of the samples, or return its position from a state_dict"
    )


def _record_writes(session: Session, size: int, is_cut_here: bool) -> list[str]:
    """Record which state the forward writes per micro-batch: BatchNorm's statistics, and any other. Collective.
    Return the kinds of the latter.

    Args:
        session: the live objects; their record of draws is extended.
        size: the micro-batches' size.
        is_cut_here: whether this rank's part of a step is several micro-batches.
    """
    depends = session.engine.draw_record.depends
    written = session.snapshot.changes

    # BatchNorm's statistics have a message of their own, with a way out.
    norms = batchnorms_of_micro_batches(session).keys()
    statistics = {name for name in written if _module_of(name) in norms}
    layers_of_tasks = sorted({_module_of(name) for name in statistics if _root_of(name) != "model"})
    if any(_root_of(name) == "model" for name in statistics):  # without any, the layers are in evaluation mode
        depends["batchnorm"] = (
            f"in training, BatchNorm normalises each micro-batch ({size}) by its own mean and variance, so outputs, "
            "gradients and running statistics depend on the size of the micro-batch; "
            f"{instead_of_batchnorm(session.config.model)} does not"
        )
    if layers_of_tasks:
        depends["batchnorm of the task"] = (
            f"in training, BatchNorm of the task ({listed(layers_of_tasks)}) normalises each micro-batch ({size}) by "
            "its own mean and variance, so the loss, gradients and running statistics depend on the size of the "
            "micro-batch; GroupNorm in its place does not, nor do layers that an embedding loss calls in "
            "loss_of_embeddings"
        )

    # Any other state, except rows that belong to samples, and a task that sees the whole step.
    modules = {"model": session.state.model, **session.state.stateful.modules}
    iterators = set(session.snapshot.advanced_iterators())  # which have a message of their own
    other_state = written - statistics - iterators - per_sample_buffers(modules)
    if has_embeddings(session.engine.task):  # the task is called once per step
        other_state = {name for name in other_state if not _root_of(name).endswith("task")}
    compare_ranks(session, other_state)
    other_state -= _bounded_embeddings(modules)
    if other_state and is_cut_here:
        names_text = listed(_kinds_first(other_state))
        depends[WRITES] = (
            f"the forward writes {names_text}, once per micro-batch ({size}), not per step: what a "
            "forward reads of them before writing them anew depends on the micro-batch"
        )
    return sorted({_kind_of(name) for name in other_state})


def compare_ranks(session: Session, names: Collection[str] = ()) -> None:
    """Compare between the ranks what forwards have begun to write since the last call: some only do so after many
    steps, as an embedding with `max_norm`. Records what differs. Collective: all ranks. Raises TrainingStopped for
    parameters: the ranks would train different models.

    Args:
        session: the live objects; their record of draws is extended.
        names: of state that the forwards write, besides the parameters that they are known to write.
    """
    if session.ranks.world_size == 1:
        return
    modules = {"model": session.state.model, **session.state.stateful.modules}
    names_here = {*names, *session.snapshot.written} - session.compared_names - per_sample_buffers(modules)
    by_rank = session.ranks.all_gather_object(sorted(names_here))
    new_names = {name for names_there in by_rank for name in names_there}
    session.compared_names |= new_names
    if new_names:
        _record_differences_of_ranks(session, modules, new_names)
        _record_objects_of_ranks(session, new_names)


def _record_differences_of_ranks(session: Session, modules: Mapping[str, nn.Module], names: Collection[str]) -> None:
    """Record which of these tensors differ between ranks: written by forwards, and not averaged by the model itself.
    Collective. Raises TrainingStopped for parameters: the ranks would train different models.
    """
    checksums = {}
    parameters = set()
    for root_name, root in modules.items():
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            full_name = f"{root_name}.{name}"
            if full_name in names and tensor.layout is torch.strided and not is_shard(tensor):
                checksums[full_name] = checksum(tensor).tolist()
                if isinstance(tensor, nn.Parameter):
                    parameters.add(full_name)

    checksums_by_rank = session.ranks.all_gather_object(checksums)
    differing = set()
    for checksums_there in checksums_by_rank[1:]:
        for name in checksums_there.keys() & checksums_by_rank[0].keys():
            if checksums_there[name] != checksums_by_rank[0][name]:
                differing.add(name)
    if differing & parameters:
        raise TrainingStopped(
            f"the forward writes the parameters {listed(sorted(differing & parameters))}, and each rank from its own "
            "samples, so that the ranks train different models; reduce what is written over all ranks in the forward, "
            "write it before training (model.init_from), or use one rank"
        )
    if differing:
        session.engine.draw_record.depends["ranks"] = (
            f"the forward writes {listed(sorted(differing))}, which differ between ranks: each rank writes them from "
            "its own samples, and a save replaces them by those of rank 0, so that what is computed from them depends "
            "on the ranks; reduce them over all ranks in the forward, or use one rank"
        )


def _record_objects_of_ranks(session: Session, names: Collection[str]) -> None:
    """Record which of these containers, and attributes of objects such as a replay buffer, differ between ranks.
    Collective.
    """
    fingerprints_by_rank = session.ranks.all_gather_object(session.snapshot.fingerprints_of_held(names))
    first = fingerprints_by_rank[0]
    differing = set()
    for fingerprints in fingerprints_by_rank[1:]:
        for name in fingerprints.keys() & first.keys():
            if fingerprints[name] != first[name]:
                differing.add(name)
    if differing:
        session.engine.draw_record.depends["objects of ranks"] = (
            f"the forward writes {listed(sorted(differing))}, and each rank its own, from its own samples, so that "
            "what is computed from them depends on the ranks; gather over all ranks what the forward writes there, or "
            "use one rank"
        )


def _bounded_embeddings(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the weights of embeddings with `max_norm`, whose rows a forward scales down before it reads them: the same
    however a batch is split. Between ranks, which read other rows, they may differ.
    """
    names = set()
    for root_name, root in modules.items():
        for name, module in root.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                names.add(f"{root_name}.{name}.weight" if name else f"{root_name}.weight")
    return names


def _module_of(name: str) -> str:
    """Return the full name of the module that a state such as `model.norm.running_mean` belongs to."""
    return name.rpartition(".")[0]


def _kinds_first(names: Collection[str]) -> list[str]:
    """Return the names with the first of each kind in front: a teacher's parameters do not hide a queue."""
    first_by_kind: dict[str, str] = {}
    for name in sorted(names):
        first_by_kind.setdefault(_kind_of(name), name)
    return list(dict.fromkeys([*first_by_kind.values(), *sorted(names)]))


def _kind_of(name: str) -> str:
    """Return the attribute of the model or the task to which a state belongs: `model.teacher` of its parameters."""
    return ".".join(name.split(".")[:2])


def _root_of(name: str) -> str:
    return name.partition(".")[0]


def _report_shared_draws(session: Session) -> None:
    """Say once which draws have no dimension of the samples, and are therefore the same for all of them."""
    record = session.engine.draw_record
    draws = set()
    for layouts in record.layouts.values():
        for layout in layouts.values():
            if not layout.is_shared:
                continue
            modules = record.modules_of_shared.get(layout.kernel)  # of one operation that several modules call, all
            in_modules = f" in {listed(sorted(modules))}" if modules else ""
            draws.add(f"{shown_name(layout.kernel)}{in_modules}")
    if draws:
        names = ", ".join(sorted(draws))
        text = f"drawn once per step, for all samples, since no dimension has their number: {names}"
        session.tracker.warn_once(text, topic="shared draws")
