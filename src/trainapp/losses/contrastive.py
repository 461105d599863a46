"""`task=contrastive`: the views of a sample find each other among all samples of the batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.losses.inputs import inputs_and_targets
from trainapp.losses.losses import Metrics


class EmbeddingTask:
    """The base of tasks whose loss compares the embeddings of a whole batch; see `train.cached_gradients`.

    A derived class has `embed` and `loss_of_embeddings`. A task without this base needs the same three methods and
    `whole_batch = True`.
    """

    whole_batch = True

    def embed(self, model: nn.Module, batch: Any) -> Any:
        """The embeddings of the batch's samples: a tensor, or a tuple or dict of tensors, of shapes [samples, ...].

        It must not compare samples, and is called twice per micro-batch.
        """
        raise NotImplementedError

    def loss_of_embeddings(self, embeddings: Any) -> tuple[Tensor, Tensor | float, Metrics]:
        """(loss_sum, count, metrics), as any task's, of what `embed` has returned for all samples of the step."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float, Metrics]:
        return self.loss_of_embeddings(self.embed(model, batch))

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """What `mode=predict` writes: the embeddings."""
        return self.embed(model, batch)


class Contrastive(EmbeddingTask):
    """The symmetric cross-entropy of InfoNCE between two views of each sample (in CLIP: an image and its text).

    Inputs are [B, 2, ...]: two views per sample, such as `data.digits.DigitPairs` gives. The model's outputs are the
    embeddings, of any shape: they are flattened and normalised. The metric is the accuracy with which the first view
    finds the second one.

    temperature: divides the cosines. Takes logits of [N, N] in memory, for the N samples of a step on all ranks.
    Raises UserError for inputs without two views.

    Sources: van den Oord et al. 2018, arXiv:1807.03748; Chen et al. 2020 (SimCLR), arXiv:2002.05709; Radford et al.
    2021 (CLIP), arXiv:2103.00020.
    """

    def __init__(self, temperature: float = 0.1):
        self.temperature = temperature

    def embed(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Of both views, each [B, features] in fp32."""
        inputs, _ = inputs_and_targets(batch)
        if inputs.ndim < 3 or inputs.shape[1] != 2:
            raise UserError(
                f"task=contrastive: needs inputs of shape [samples, 2, ...], two views of each sample, but they have "
                f"{list(inputs.shape)}; data._target_=trainapp.data.sets.digits.DigitPairs "
                "has them"
            )
        features = model(inputs.flatten(0, 1)).flatten(1).float()
        first, second = F.normalize(features, dim=1).unflatten(0, (-1, 2)).unbind(1)
        return first, second

    def loss_of_embeddings(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, int, Metrics]:
        """Both directions count half."""
        first, second = embeddings
        logits = first @ second.T / self.temperature
        own = torch.arange(len(logits), device=logits.device)
        to_second, to_first = (F.cross_entropy(each.float(), own, reduction="sum") for each in (logits, logits.T))
        return (to_second + to_first) / 2, len(logits), {"accuracy": (logits.argmax(1) == own).sum()}
