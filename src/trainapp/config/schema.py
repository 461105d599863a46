"""The configuration: every setting with its type and its rule. Imports no torch.

`compose` turns what Hydra composed into these plain dataclasses. Everything
downstream, workers included, sees only these.
"""

import dataclasses
import re
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator
from pydantic.dataclasses import dataclass

from trainapp.config import durations, micro_schedule
from trainapp.config.validation import Bool, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Str
from trainapp.units import parse_memory_size

STRICT = ConfigDict(extra="forbid")


def _duration(value: int | str) -> int | str:
    durations.parse(value)
    return value


def _memory_size(value: int | float | str) -> int | float | str:
    parse_memory_size(value, total=1)
    return value


def _byte_count(value: int | float | str) -> int | float | str:
    try:
        if parse_memory_size(value, total=0):  # a fraction of nothing is none
            return value
    except ValueError:
        pass
    raise ValueError("must be bytes, or a size such as 6GiB or 500MB")


def _objective(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"(min|max) \S+", value):
        raise ValueError("must be auto, or like 'max accuracy' or 'min loss'")
    return value


Duration = Annotated[int | str, AfterValidator(_duration)]
MemorySize = Annotated[int | float | str, AfterValidator(_memory_size)]
ByteCount = Annotated[int | float | str, AfterValidator(_byte_count)]
MicroSchedule = Annotated[dict[int, int | dict[int, int]], PlainValidator(micro_schedule.check)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # data sets may still add to it, below 2**64
Auto = Literal["auto"]


@dataclass(config=STRICT)
class Train:
    max_steps: PositiveInt | None = None
    max_epochs: PositiveInt | None = None
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: Bool = False
    deterministic: Bool = False
    grad_clip: PositiveFloat | None = 1.0
    nonfinite: Literal["stop", "skip"] = "stop"
    detect_anomaly: Bool = False
    check_exactness: Bool = False
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None


@dataclass(config=STRICT)
class Batch:
    global_size: PositiveInt = 64
    micro_size: Literal["auto", "plan"] | PositiveInt = "auto"
    eval_micro_size: Auto | PositiveInt = "auto"
    micro_schedule: MicroSchedule | None = None


@dataclass(config=STRICT)
class Every:
    log: Duration | None = 10
    eval: Duration | None = "1 epochs"
    save: Duration | None = "1 epochs"


@dataclass(config=STRICT)
class Loader:
    num_workers: Auto | NonNegativeInt = "auto"
    drop_last: Bool = False
    on_change: Literal["refuse", "next_epoch"] = "refuse"


@dataclass(config=STRICT)
class Precision:
    mode: Literal["fp32", "tf32", "bf16", "bf16_pure", "fp16", "int8", "fp8"] = "fp32"
    initial_scale: PositiveFloat = 65536.0
    growth_interval: PositiveInt = 2000


@dataclass(config=STRICT)
class Schedule:
    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Duration = 0
    decay: Duration = "20 percent"
    final: Annotated[float, Field(ge=0, le=1)] = 0.0


@dataclass(config=STRICT)
class Optimizer:
    """The settings that the application reads; `arguments` go to the optimizer class unchanged."""

    target: Str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    fused: Auto | Bool = "auto"
    in_backward: Bool = False
    offload: Bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(config=STRICT)
class Accumulation:
    steps: Auto | PositiveInt = "auto"


@dataclass(config=STRICT)
class ActivationCheckpointing:
    mode: Literal["none", "full", "selective", "budget"] = "none"
    every: PositiveInt = 1
    bytes: Auto | ByteCount = "auto"


@dataclass(config=STRICT)
class Memory:
    limit: MemorySize | None = None
    loss_chunk: Auto | PositiveInt | None = None
    offload_activations: Literal["none", "all", "inputs"] = "none"
    expandable_segments: Bool = True
    timeline: Bool = False
    guard: Bool = True
    guard_reserve: MemorySize = 0.05


@dataclass(config=STRICT)
class Plan:
    device: Str | None = None
    world: PositiveInt | None = None
    levers: Bool = True


@dataclass(config=STRICT)
class Oom:
    enabled: Bool = True
    keep_global_batch: Bool = True
    clean_steps: PositiveInt = 3
    grow: Bool = True
    remember: Literal["clear"] | Bool = True
    plan: Bool = True


@dataclass(config=STRICT)
class Ddp:
    bucket_mb: PositiveFloat = 25.0
    static_graph: Bool = False
    find_unused_parameters: Bool = False


@dataclass(config=STRICT)
class Fsdp:
    reshard_after_forward: Bool = True
    cpu_offload: Bool = False
    prefetch: PositiveInt = 1
    replicas: PositiveInt = 1
    sync_every_micro_batch: Bool = True
    meta_init: Bool = False


@dataclass(config=STRICT)
class Parallel:
    strategy: Literal["single", "ddp", "fsdp"] = "single"
    devices: Auto | PositiveInt = "auto"
    nodes: PositiveInt = 1
    endpoint: Str | None = None
    run_id: Str | None = None
    max_restarts: NonNegativeInt = 3
    timeout: PositiveFloat = 600.0
    vote_on_oom: Literal["unproven", "always", "never"] = "unproven"
    ddp: Ddp = field(default_factory=Ddp)
    fsdp: Fsdp = field(default_factory=Fsdp)


@dataclass(config=STRICT)
class Checkpointing:
    resume: Str = "auto"
    save: Bool = True
    keep_last: PositiveInt = 2
    asynchronous: Bool = False


@dataclass(config=STRICT)
class Export:
    folder: Str | None = None
    file_size: MemorySize = "5GB"
    merge: Bool = False


@dataclass(config=STRICT)
class Adapter:
    kind: Literal["none", "lora"] = "none"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: Fraction = 0.0
    targets: Auto | list[Str] = "auto"
    train: Auto | list[Str] = "auto"
    base_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(config=STRICT)
class Target:
    """An object to build: a dotted name and the keyword arguments of its constructor."""

    target: Str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(config=STRICT)
class Model(Target):
    init_from: Str | None = None
    init_strict: Bool = True
    freeze: list[Str] = field(default_factory=list)


@dataclass(config=STRICT)
class Config:
    """One run. `run_dir` is where the run writes its files; `command` is the shell command that resumes it; `given` are
    the sections that the command line names.
    """

    data: Target
    loader: Loader
    model: Model
    optimizer: Optimizer
    mode: Literal["train", "eval", "export", "plan"] = "train"
    task: Str = "auto"
    objective: Annotated[str, AfterValidator(_objective)] = "auto"
    user_packages: list[Str] = field(default_factory=list)
    train: Train = field(default_factory=Train)
    batch: Batch = field(default_factory=Batch)
    every: Every = field(default_factory=Every)
    precision: Precision = field(default_factory=Precision)
    schedule: Schedule = field(default_factory=Schedule)
    accumulation: Accumulation = field(default_factory=Accumulation)
    parallel: Parallel = field(default_factory=Parallel)
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    memory: Memory = field(default_factory=Memory)
    oom: Oom = field(default_factory=Oom)
    plan: Plan = field(default_factory=Plan)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    export: Export = field(default_factory=Export)
    adapter: Adapter = field(default_factory=Adapter)
    run_dir: str = ""
    command: str = ""
    given: list[str] = field(default_factory=list, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, as written to checkpoints and TensorBoard."""
        return dataclasses.asdict(self)
