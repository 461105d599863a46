"""The losses that come with trainapp, for users' own code."""

from trainapp.techniques.chunked_loss import linear_cross_entropy
from trainapp.train.contrastive import Contrastive, EmbeddingTask
from trainapp.train.losses import IGNORED, Metrics, Task, classification, next_token
from trainapp.train.model_inputs import inputs_and_targets

__all__ = [
    "IGNORED",
    "Contrastive",
    "EmbeddingTask",
    "Metrics",
    "Task",
    "classification",
    "inputs_and_targets",
    "linear_cross_entropy",
    "next_token",
]
