"""Messages to the author of a model or a data set name what that part has, not what the built-in ones have."""

import pytest
import runs
import torch
from torch import nn

from trainapp.errors import UserError

OWN = ("model=mlp", "~model.width", "~model.depth", "~model.dropout", "user_packages=[test_own_parts_messages]")
NORMED = (*OWN, "model._target_=test_own_parts_messages.Normed")


class Normed(nn.Module):
    def __init__(self, norm: str = "batch"):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs):
        return self.linear(self.norm(inputs.flatten(1)))


class Digits(torch.utils.data.Dataset):
    task = "regression"

    def __init__(self, split):
        self.spec = {"image_shape": (1, 8, 8), "num_classes": 10}

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.zeros(1, 8, 8), 0


class Untold(Digits):
    task = None


@pytest.mark.parametrize(
    ("overrides", "advice", "not_said"),
    [
        (NORMED, "or GroupNorm in its place in the model", "model.norm"),
        (("model=resnet", "model.width=4"), "or GroupNorm (model.norm=group)", "in its place"),
    ],
)
def test_batchnorms_refusal_advises_a_setting_only_where_there_is_one(tmp_path, overrides, advice, not_said):
    with pytest.raises(UserError) as refused:
        runs.prepare(tmp_path, *overrides, "precision=bf16_pure", "optimizer=adamw_bf16")
    message = str(refused.value)
    assert message == f"precision=bf16_pure: BatchNorm needs its weights in fp32; use precision=bf16, {advice}"
    assert not_said not in message


def test_a_model_of_ones_own_is_frozen_without_a_plus(tmp_path):
    config = runs.configure(tmp_path, *NORMED, "model.freeze=[norm]")
    assert config.model.freeze == ["norm"]
    run = runs.prepare(tmp_path, *NORMED, "model.freeze=[norm]")
    trained = {name for name, parameter in run.state.model.named_parameters() if parameter.requires_grad}
    assert trained == {"linear.weight", "linear.bias"}
    run.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Digits", "says that its task is 'regression', which must be one of classification, next_token"),
        (
            "Untold",
            "does not say what its task is; set task to classification, next_token, contrastive or a function of yours",
        ),
    ],
)
def test_a_wrong_task_of_a_data_set_is_not_called_missing(tmp_path, name, message):
    own = (*OWN, "+model.width=4", "+model.depth=2", "+model.dropout=0", "~data.augment")
    with pytest.raises(UserError, match=rf"^task=auto: test_own_parts_messages\.{name} {message}"):
        runs.prepare(tmp_path, *own, f"data._target_=test_own_parts_messages.{name}")
