"""What each value of the setting `mode` does: one table, which all other code asks. Imports no torch."""

from typing import Literal, NamedTuple

Mode = Literal["train", "eval", "predict", "generate", "export", "plan", "lr_find"]


class Activity(NamedTuple):
    """What a command does, by its `mode`. `Config.activity` is that of a configuration."""

    trains: bool = False  # a run: until its end, with checkpoints, logs and result.json
    makes_steps: bool = False  # of the optimizer, in a run or to try learning rates
    computes_loss: bool = True  # and metrics; otherwise only the model's outputs or its weights are of interest
    needs_checkpoint: bool = False  # which `checkpointing.resume` must name
    writes_rows: bool = False  # one per sample or prompt; the same command continues after those that are written
    is_one_process: bool = False  # whatever the number of ranks whose checkpoint it loads
    writes_settings: bool = True  # to .hydra/ in the run directory


ACTIVITIES: dict[str, Activity] = {
    "train": Activity(trains=True, makes_steps=True),
    "eval": Activity(needs_checkpoint=True),
    "predict": Activity(computes_loss=False, needs_checkpoint=True, writes_rows=True),
    "generate": Activity(computes_loss=False, needs_checkpoint=True, writes_rows=True, is_one_process=True),
    "export": Activity(computes_loss=False, needs_checkpoint=True, is_one_process=True),
    "plan": Activity(writes_settings=False),
    "lr_find": Activity(makes_steps=True, is_one_process=True, writes_settings=False),
}
