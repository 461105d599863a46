"""An embedding with `max_norm` writes its weights in forwards, and depends on no micro-batch: no alarm."""

import runs
import torch
from helpers import metrics, result
from torch import nn


class Codes(nn.Module):
    """A code per class of brightness, scaled down where it is read."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.codes = nn.Embedding(4, num_classes, max_norm=0.3)
        self.head = nn.Linear(64, num_classes)

    def forward(self, inputs):
        pixels = inputs.flatten(1)
        brightness = (pixels.mean(1) * 4).long().abs() % 4
        return self.head(pixels) + self.codes(brightness)


CODES = (*runs.own_model("test_bounded_embeddings.Codes"), "user_packages=[test_bounded_embeddings]", "data=digits")
STEPS = ("train.max_steps=4", "every.eval=2", "every.log=1", "optimizer=sgd", "optimizer.lr=0.5")


def test_the_same_however_the_batch_is_split(tmp_path, caplog):
    losses = []
    for size in (16, 3):
        runs.run(tmp_path / str(size), *CODES, *STEPS, f"batch.micro_size={size}", "batch.eval_micro_size=50")
        losses.append([line["loss"] for line in metrics(tmp_path / str(size))])
    torch.testing.assert_close(*map(torch.tensor, losses))
    assert result(tmp_path / "3")["depends_on_micro_batch"] == []
    assert "codes" not in caplog.text
