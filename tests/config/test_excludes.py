"""Settings that exclude each other: every row of the table, by a command line that it refuses."""

import pytest

from trainapp.config import compose, excludes
from trainapp.errors import UserError

TWO = "updates=[{name: a, task: auto, parameters: [x]}, {name: b, task: auto, parameters: [y]}]"
REFUSED = [
    ("train.max_epochs=null", "train.max_steps=null with train.max_epochs=null with mode=train: the run would never"),
    ("accumulation=fixed batch.micro_size=8", "accumulation.steps=4 with batch.micro_size=8: both fix the micro-batch"),
    ("train.detect_anomaly=true precision=fp16", "train.detect_anomaly=true with precision=fp16 with precision.init"),
    (TWO.replace("name: b", "name: a"), "updates: two of them have the same name"),
    (
        TWO.replace("[x]", "[x], optimizer: {_target_: torch.optim.SGD}").replace(
            "[y]", "[y], optimizer: {_target_: torch.optim.SGD}"
        )
        + "|optimizer.groups=[{match: x, lr: 1}]",
        "optimizer.groups with updates: each of them has an optimizer of its own",
    ),
    (TWO.replace("{name: a", "{every: 2, name: a"), "updates: the first update must run in every step"),
    (f"{TWO}|batch.micro_schedule={{1:4}}", "batch.micro_schedule with updates: with updates it needs sizes for each"),
    ("batch.micro_schedule={a:{1:4}}", "batch.micro_schedule with updates=[]: with updates it needs sizes for each"),
    (f"{TWO}|optimizer.in_backward=true", "optimizer.in_backward=true with updates: the backward of one update"),
    (
        f"{TWO}|stopping.patience=3",
        "stopping.patience=3 with stopping.metric=auto with objective=auto: with several updates no single metric says",
    ),
    *(
        (f"optimizer.in_backward=true train.grad_clip=null {other}", f"optimizer.in_backward=true with {other}: each")
        for other in (
            *("train.grad_clip=1.0", "precision=fp16", "train.nonfinite=skip", "train.compile=true"),
            "optimizer.offload=true",
        )
    ),
    ("optimizer.in_backward=true train.grad_clip=null parallel=ddp", "optimizer.in_backward=true with parallel=ddp"),
    ("optimizer=adamw_4bit parallel=fsdp", "optimizer.state_dtype=4bit with parallel=fsdp: the state belongs to"),
    ("optimizer=adafactor parallel=fsdp", "optimizer._target_=torch.optim.Adafactor with parallel=fsdp: its state"),
    ("optimizer.offload=true parallel=fsdp", "optimizer.offload=true with parallel=fsdp: FSDP keeps its shards"),
    ("memory.offload_activations=all train.compile=true", "memory.offload_activations=all with train.compile=true: a"),
    ("memory.offload_activations=inputs", "memory.offload_activations=inputs with activation_checkpointing=none: it"),
    ("memory.offload_activations=all parallel=fsdp", "memory.offload_activations=all with parallel=fsdp: parameters"),
    ("precision=bf16_pure train.ema=0.9 optimizer=adamw_bf16", "precision=bf16_pure with train.ema=0.9: an average"),
    ("+parallel.fsdp.cpu_offload=true", "parallel.fsdp.cpu_offload=true with parallel=single: it applies only"),
    ("+parallel.fsdp.meta_init=true", "parallel.fsdp.meta_init=true with parallel=single: it applies only"),
    ("adapter=lora adapter.base_dtype=bf16", "adapter.base_dtype=bf16 with precision=fp32: matmuls with a base in"),
    ("adapter=lora parallel=fsdp parallel.fsdp.meta_init=true", "adapter=lora with parallel.fsdp.meta_init=true: the"),
    ("model=hf +model.path=x parallel=fsdp parallel.fsdp.meta_init=true", "model._target_=trainapp.models.hugging"),
    ("callbacks=predictions memory.loss_chunk=16", "memory.loss_chunk=16 with metrics: metrics get logits"),
    (
        "task.output=0 memory.loss_chunk=auto",
        "memory.loss_chunk=auto: the loss in chunks replaces the model's last layer",
    ),
    ("mode=eval", "mode=eval with checkpointing.resume=auto: it needs a trained model; name the checkpoint"),
    ("mode=generate checkpointing.resume=x parallel=ddp generate.prompts=[a]", "mode=generate with parallel=ddp: this"),
    ("mode=predict checkpointing.resume=x parallel=fsdp", "mode=predict with parallel=fsdp: each process"),
    ("mode=generate checkpointing.resume=x generate.prompts=['']", "mode=generate with generate.prompts: there is"),
    (f"mode=lr_find|{TWO}", "mode=lr_find with updates: the losses of several optimizers"),
    ("mode=lr_find checkpointing.resume=x", "mode=lr_find with checkpointing.resume=x: it starts from initial weights"),
    (
        "mode=lr_find|optimizer._target_=torch.optim.SGD|optimizer.groups=[{match: x, lr: 1}]",
        "mode=lr_find with optimizer.groups with optimizer.lr=null: the groups' rates keep their ratio",
    ),
]


def split(overrides):
    return overrides.split("|") if "|" in overrides or "{" in overrides else overrides.split()


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_it_is_refused(overrides, message):
    with pytest.raises(UserError) as refused:
        compose.from_command_line(split(overrides))
    assert str(refused.value).startswith(message)


def test_every_row_refuses_one_of_them(monkeypatch):
    rows, conflicts = excludes.EXCLUSIONS, excludes.conflicts
    monkeypatch.setattr(excludes, "conflicts", lambda config: [])
    configs = [compose.from_command_line(split(overrides)) for overrides, _ in REFUSED]
    unused = []
    for row in rows:
        monkeypatch.setattr(excludes, "EXCLUSIONS", (row,))
        if not any(map(conflicts, configs)):
            unused.append(row)
    assert unused == []


def test_the_default_is_not_refused_and_every_row_says_what_to_do():
    assert excludes.conflicts(compose.from_command_line([])) == []
    assert all(row.reason and row.remedy for row in excludes.EXCLUSIONS)


def test_all_that_are_broken_are_reported():
    with pytest.raises(UserError) as refused:
        compose.from_command_line(["train.max_epochs=null", "optimizer.in_backward=true"])
    assert len(str(refused.value).splitlines()) == 2
