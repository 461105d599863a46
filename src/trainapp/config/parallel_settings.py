"""The section `parallel` of the schema. Imports no torch."""

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from trainapp.config.rules import Auto
from trainapp.config.validation import Bool, NonNegativeInt, PositiveFloat, PositiveInt, Str

STRICT = ConfigDict(extra="forbid")


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
