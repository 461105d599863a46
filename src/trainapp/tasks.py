"""The built-in losses, for users' code."""

from trainapp.losses.contrastive import Contrastive, EmbeddingTask
from trainapp.losses.losses import IGNORED, Metrics, Task, classification, inputs_and_targets, next_token
from trainapp.techniques.chunked_loss import linear_cross_entropy

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
