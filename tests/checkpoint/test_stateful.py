"""State outside of tensors: what is refused, what is said."""

import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
import writing_models
from torch import nn

from trainapp.errors import UserError

# That a resumed run is the uninterrupted one, and without the saved state is not: tests/zoo.
MLP = (
    "user_packages=[writing_models,test_stateful]",
    "data=digits",
    "batch.micro_size=8",
    "model=mlp",
    "model.width=16",
)


class Unplain:
    """A task whose state is an object."""

    def __call__(self, model, batch):
        loss, _ = writing_models.cross_entropy(model, batch)
        return loss, len(batch["targets"]), {}

    def state_dict(self):
        return {"held": [SimpleNamespace()]}

    def load_state_dict(self, state):
        pass


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        runs.run(tmp_path, *MLP, "task=test_stateful.Unplain")
    assert str(error.value).startswith("the state of task['held'][0] is a types.SimpleNamespace, which a checkpoint")
    assert str(error.value).endswith("set checkpointing=off")
    runs.run(tmp_path, *MLP, "task=test_stateful.Unplain", "checkpointing=off")


class Renamed(Unplain):
    """A task whose method expects another state than it has returned."""

    def state_dict(self):
        return {"queue": [1]}

    def load_state_dict(self, state):
        self.queue = state["que"]


def test_an_error_in_a_users_method_keeps_its_class_and_its_place(tmp_path):
    """It is a fault of their code, and no misfit of the configuration: a resume must not turn it into one."""
    runs.run(tmp_path, *MLP, "task=test_stateful.Renamed", "train.max_steps=1")
    with pytest.raises(KeyError) as failed:
        runs.run(tmp_path, *MLP, "task=test_stateful.Renamed", "train.max_steps=2")
    assert traceback.extract_tb(failed.value.__traceback__)[-1].line == 'self.queue = state["que"]'
    assert "task: it does not take its state in the checkpoint" in failed.value.__notes__


def test_workers_do_not_draw_from_a_state(tmp_path, caplog):
    stateful = (*MLP, "~data.augment", "data._target_=test_stateful.CountingDigits", "data.num_workers=1")
    run = runs.prepare(tmp_path / "s", *stateful)
    assert run.batches._loader.workers == 0
    run.close()
    noisy = (*MLP, "~data.augment", "data._target_=test_stateful.NoisyDigits", "checkpointing=off")
    runs.prepare(tmp_path / "a", *noisy, "data.num_workers=1").close()
    assert "the data is stateful (data.digits.noise, eval_data.digits.noise)" in caplog.text
    assert "may see other numbers" in caplog.text
    run = runs.prepare(tmp_path / "b", *noisy)
    assert run.batches._loader.workers == 0
    run.close()


@pytest.mark.parametrize(
    ("transform", "written"), [("Plain", ""), ("Centred", ""), ("Scratch", "pad"), ("Remembering", "last")]
)
def test_workers_are_kept_for_modules_that_fetching_does_not_change(tmp_path, caplog, transform, written):
    """Transforms are often modules. Of others the message names what is written, so that it can be made local."""
    data = (*MLP, "~data.augment", "data._target_=test_stateful.Transformed", f"+data.transform={transform}")
    session = runs.closed(tmp_path, *data, "data.num_workers=1")
    assert session.batches._loader.workers == (0 if written else 1)
    text = f"the data is stateful (data.transform.{written}, eval_data.transform.{written})"
    assert (text in caplog.text) == bool(written)
    assert ("stateful" in caplog.text) == bool(written)


class Plain(nn.Module):
    def forward(self, image):
        return image + 1


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def forward(self, image):
        return image - self.mean


class Scratch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pad", torch.zeros(1, 10, 10), persistent=False)

    def forward(self, image):
        self.pad[:, 1:9, 1:9] = image
        return self.pad[:, :8, :8].clone()


class Remembering(nn.Module):
    def forward(self, image):
        self.last = image
        return image


class Transformed:
    """Not in memory, so that workers fetch; samples are computed with a module."""

    task = "classification"

    def __init__(self, split: str, transform: str):
        self.transform = globals()[transform]()
        self.spec = {"image_shape": (1, 8, 8), "num_classes": 10}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        return {"inputs": self.transform(torch.rand(1, 8, 8)), "targets": torch.tensor(index % 10)}


class NoisyDigits:
    """Not in memory, so that workers would fetch; owns a generator, and no other state."""

    task = "classification"

    def __init__(self, split: str):
        self.digits = SimpleNamespace(noise=np.random.default_rng(1))
        self.spec = {"image_shape": (1, 8, 8), "num_classes": 10}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        inputs = torch.from_numpy(self.digits.noise.normal(size=(1, 8, 8)).astype(np.float32))
        return {"inputs": inputs, "targets": torch.tensor(index % 10)}


class CountingDigits(NoisyDigits):
    """With a state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def test_another_task_starts_from_its_initial_state_and_says_so(tmp_path, caplog):
    runs.run(tmp_path, *MLP, "task=writing_models.QueueTask", "train.max_steps=2")
    runs.run(tmp_path, *MLP, "train.max_steps=3")
    assert "state of task, task.meters.seen, task.noise.0: it starts from its initial state" in caplog.text


def test_a_teacher_that_a_task_makes_in_its_first_call_is_left_out(tmp_path, caplog):
    """A new task has none to fill: the checkpoint could not be loaded."""
    settings = (*MLP, "task=writing_models.LateTeacher", "every.save=2", "batch.micro_size=16")
    runs.run(tmp_path, *settings, "train.max_steps=2")
    assert "does not hold what training changes in task.teacher.head.bias" in caplog.text
    assert list(runs.saved(tmp_path, 2)["stateful"][0]["task"]) == ["scale"]
    assert runs.run(tmp_path, *settings, "train.max_steps=3").steps == 3


class FixedNetwork:
    """A loss with a frozen network from a fixed seed, which it builds at once or in its first call."""

    def __init__(self, is_late: bool):
        self.networks = [] if is_late else [self.build()]

    def build(self):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Linear(64, 4).requires_grad_(False)

    def __call__(self, model, batch):
        if not self.networks:
            self.networks.append(self.build())
        features = self.networks[0](batch["inputs"].flatten(1))
        outputs = model(batch["inputs"])
        return (outputs[:, :4] - features).square().sum(), len(outputs), {}


@pytest.mark.parametrize("is_late", [True, False])
def test_what_to_do_about_a_fixed_network_that_the_first_call_builds(tmp_path, caplog, is_late):
    """It cannot be told from a copy of trained weights. Built at once, as the warning advises, it is not named."""
    task = f"task={{_target_: test_stateful.FixedNetwork, is_late: {is_late}}}"
    settings = (*MLP, task, "every.save=2", "every.eval=null")
    runs.run(tmp_path, *settings, "train.max_steps=2")
    runs.run(tmp_path, *settings, "train.max_steps=4")
    assert ("does not hold what training changes in task.networks" in caplog.text) == is_late
    assert ("or the first one builds it the same in each process" in caplog.text) == is_late
    assert ("unless it is a fixed network" in caplog.text) == is_late
