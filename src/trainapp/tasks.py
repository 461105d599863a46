"""The losses that come with trainapp, for users' own code."""

from trainapp.train.losses import IGNORED, Metrics, Task, classification, inputs_and_targets, next_token

__all__ = ["IGNORED", "Metrics", "Task", "classification", "inputs_and_targets", "next_token"]
