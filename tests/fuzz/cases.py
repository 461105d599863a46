"""Random runs: a cell of the zoo, settings, and what happens to it."""

from dataclasses import dataclass, field
from typing import Any

from faults import PHASES, Fault
from hypothesis import strategies as st
from zoo.catalogue import ALL

# Their models need more than one sample in a forward.
NEED_TWO = {"mean teacher through data", "actnorm", "batchnorm", "running scale"}
# Evaluation writes into the model, so that the training result depends on how it was cut; or no checkpoint holds all.
DEPEND_ON_MORE = {name for name, cell in ALL.items() if not cell.resumes} | {"writes in evaluation"}
NAMES = sorted(ALL.keys() - NEED_TWO - DEPEND_ON_MORE)
# Their own arithmetic allows autocast.
MIXED = {"unit weights", "transformer", "tied weights", "dict", "tuple", "strings"}


@dataclass(frozen=True)
class Stop:
    """A signal arrives during the step after so many finished ones."""

    after: int


@dataclass(frozen=True)
class Raise:
    """The data set fails once, at the n-th sample fetched after so many finished steps; the run is restarted."""

    after: int
    sample: int


@dataclass
class Case:
    """name: the cell; settings: "section.key" to value; later: settings that each restart changes, in turn."""

    name: str
    settings: dict[str, Any]
    events: list[Fault | Stop | Raise] = field(default_factory=list)
    later: list[dict[str, Any]] = field(default_factory=list)


OPTIMIZERS = {
    "adamw": {},
    "sgd": {"optimizer.target": "torch.optim.SGD", "optimizer.lr": 0.1, "optimizer.arguments": {"momentum": 0.9}},
    "adagrad": {"optimizer.target": "torch.optim.Adagrad", "optimizer.arguments": {}},
    "rmsprop": {"optimizer.target": "torch.optim.RMSprop", "optimizer.arguments": {"momentum": 0.5}},
}


@st.composite
def settings_of(draw: Any, name: str) -> dict[str, Any]:
    """Settings that the cell can run with."""
    chosen: dict[str, Any] = {
        "batch.global_size": draw(st.integers(1, 24)),
        "batch.micro_size": draw(st.one_of(st.just("auto"), st.integers(1, 24))),
        "batch.eval_micro_size": draw(st.one_of(st.just("auto"), st.integers(1, 12))),
        "data.size": draw(st.one_of(st.integers(16, 40), st.integers(1, 40))),
        "data.val_size": draw(st.integers(1, 12)),
        "data.drop_last": draw(st.booleans()),
        "train.seed": draw(st.integers(0, 3)),
        "train.grad_clip": draw(st.sampled_from([None, 0.1, 1.0])),
        "train.ema": draw(st.sampled_from([None, 0.9])),
        "every.eval": draw(st.sampled_from([None, 1, 2, 3])),
        "every.save": draw(st.sampled_from([None, 1, 2, 3])),
        "checkpointing.save": draw(st.sampled_from([True, True, False])),
        "checkpointing.asynchronous": draw(st.booleans()),
        "checkpointing.keep_last": draw(st.integers(1, 2)),
        "oom.grow": draw(st.booleans()),
        "oom.clean_steps": draw(st.integers(1, 3)),
        "accumulation.steps": draw(st.sampled_from(["auto", "auto", "auto", 1, 2, 3])),
        "schedule.shape": draw(st.sampled_from(["constant", "cosine", "linear"])),
        "train.nonfinite": draw(st.sampled_from(["stop", "skip"])),
    }
    if draw(st.booleans()):
        chosen |= {"train.max_steps": draw(st.integers(1, 7))}
    else:
        chosen |= {"train.max_steps": None, "train.max_epochs": draw(st.integers(1, 2))}
        chosen["batch.global_size"] = max(chosen["batch.global_size"], chosen["data.size"] // 5)  # a short run
    if name not in ("complex",):
        chosen |= OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))]
    if name in MIXED:
        chosen["precision.mode"] = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
        chosen["precision.initial_scale"] = draw(st.sampled_from([256.0, 2.0**24]))  # the second overflows
    if ALL[name].data == "data.Vectors" and draw(st.integers(0, 4)) == 0:
        chosen["data.spoiled"] = draw(st.lists(st.integers(0, 39), min_size=1, max_size=2, unique=True))
    return chosen


PLACES = (*PHASES, "commit", "after the commit", "weight average", "evaluate")
EVENTS = st.one_of(
    st.builds(Fault, st.sampled_from(PLACES), st.integers(1, 7), st.integers(0, 80)),
    st.builds(Stop, st.integers(0, 6)),
    st.builds(Raise, st.integers(0, 6), st.integers(1, 12)),
)
LATER = st.fixed_dictionaries(
    {},
    optional={
        "batch.micro_size": st.one_of(st.just("auto"), st.integers(1, 24)),
        "memory.limit": st.sampled_from([None, 30_000, 60_000, 200_000]),
        "oom.grow": st.booleans(),
    },
)


@st.composite
def cases(draw: Any) -> Case:
    """Any run that may be asked for."""
    name = draw(st.sampled_from(NAMES))
    chosen = draw(settings_of(name))
    if draw(st.integers(0, 3)) == 0:
        chosen["memory.limit"] = draw(st.integers(8_000, 120_000))
    events = draw(st.lists(EVENTS, min_size=draw(st.sampled_from([0, 1, 2])), max_size=4))
    return Case(name, chosen, events, draw(st.lists(LATER, max_size=2)))
