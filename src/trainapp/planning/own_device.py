"""Plans for the device of this machine. A GPU is planned like one that is not here, in a process that sees none: what
is pretended of CUDA (`plan.cuda.pretend`) is tested without a device.
"""

import dataclasses

import torch

from trainapp.assembly.components import choose_device
from trainapp.config.schema import Config, Plan
from trainapp.planning.cuda.devices import spelled
from trainapp.planning.ranks import world_of
from trainapp.train.run import Run


def unseen(config: Config) -> Plan | None:
    """The settings of a plan for CUDA, complete, in a process that sees GPUs: to be made in one that does not. None in
    that one, and for a plan of the CPU.

    Raises UserError for settings that conflict or do not say.
    """
    if not torch.cuda.is_available():
        return None
    device = config.plan.device
    if device is None:
        own = choose_device(config.train.device)
        if own.type != "cuda":
            return None
        device = spelled(torch.cuda.get_device_properties(own), is_named=True)
    return dataclasses.replace(config.plan, device=device, world=world_of(config))


def config_to_plan(run: Run) -> Config:
    """The run's configuration as one to plan for the device that it is on, whatever `mode=plan` would ask.

    On a GPU the limit is what the run may reserve there.
    """
    config, device = run.config, run.state.device
    plan, memory = Plan(levers=False), config.memory
    if device.type == "cuda":
        plan.device = spelled(torch.cuda.get_device_properties(device), is_named=True)
        memory = dataclasses.replace(memory, limit=run.memory.enforced)
    train = dataclasses.replace(config.train, device="cpu" if device.type == "cpu" else "auto")
    return dataclasses.replace(config, plan=plan, memory=memory, train=train)
