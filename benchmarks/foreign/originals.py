"""Runs the training loops of public programs, and records their first weights, their samples and their losses.

Each function takes the checkout, the number of steps and a folder. It saves in the folder what the port starts from:
`start.pt`, a state_dict, and `samples.pt`, tensors with a row per sample in the order of training. Programs draw random
numbers in the order of their calls and trainapp by sample, so dropout is off and noise comes with the samples.
"""

import contextlib
import itertools
import os
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from definitions import definitions, run_last_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NEVER = 10**9  # as an interval of steps


@dataclass
class Backwards:
    """The loss of every call of `backward`, and when it was called."""

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def of_step(self, calls: int) -> list[list[float]]:
        """The losses of a step's calls, by step."""
        return [self.losses[first : first + calls] for first in range(0, len(self.losses), calls)]

    def seconds_per_step(self, calls: int) -> list[float]:
        """Between the first call of a step and that of the next one."""
        firsts = self.times[::calls]
        return [after - before for before, after in itertools.pairwise(firsts)]


@dataclass
class Original:
    """A finished original: its losses by the name that the port's metrics give them, and its seconds by step."""

    losses: dict[str, list[float]]
    seconds: list[float]


@contextlib.contextmanager
def recorded_backwards() -> Iterator[Backwards]:
    """Every loss that is backpropagated, by whatever loop."""
    found, backward = Backwards(), Tensor.backward

    def recording(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        found.losses.append(loss.item())
        found.times.append(time.perf_counter())
        backward(loss, *args, **kwargs)

    with mock.patch.object(Tensor, "backward", recording):
        yield found


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Programs write into the current directory, and print a line per step."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        os.chdir(before)


def save_start(folder: Path, model: nn.Module, **samples: Tensor) -> None:
    """Save what the port starts from."""
    torch.save(model.state_dict(), folder / "start.pt")
    torch.save(samples, folder / "samples.pt")


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model, whose dropout keeps everything."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loader(*tensors: Tensor, batch: int) -> DataLoader:
    """Batches in the samples' order."""
    return DataLoader(TensorDataset(*tensors), batch_size=batch)


def mnist(checkout: Path, steps: int, folder: Path) -> Original:
    """Two epochs with a schedule that changes the rate between them."""
    program = definitions(checkout / "mnist/main.py")
    model, batch = without_dropout(program.Net()), 64
    images, digits = torch.randn(steps * batch, 1, 28, 28), torch.randint(10, (steps * batch,))
    save_start(folder, model, inputs=images, targets=digits)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    args = SimpleNamespace(log_interval=NEVER, dry_run=False)
    epochs = zip(images.chunk(2), digits.chunk(2), strict=True)
    with in_folder(folder), recorded_backwards() as found:
        for number, (inputs, targets) in enumerate(epochs, start=1):
            batches = loader(inputs, targets, batch=batch)
            program.train(args, model, torch.device("cpu"), batches, optimizer, number)
            schedule.step()
    return Original({"loss": found.losses}, found.seconds_per_step(1))


def vae(checkout: Path, steps: int, folder: Path) -> Original:
    """Its noise is that of the samples, instead of `torch.randn_like`."""
    program, batch = definitions(checkout / "vae/main.py"), 512
    model = program.VAE()
    images, noise = torch.rand(steps * batch, 1, 28, 28), torch.randn(steps * batch, 20)
    save_start(folder, model, inputs=images, noise=noise)
    _set(program, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), device=torch.device("cpu"))
    _set(program, train_loader=loader(images, images, batch=batch), args=SimpleNamespace(log_interval=NEVER))
    draws = mock.patch.object(torch, "randn_like", side_effect=noise.split(batch))
    with in_folder(folder), recorded_backwards() as found, draws:
        program.train(1)
    return Original({"loss": found.losses}, found.seconds_per_step(1))


def super_resolution(checkout: Path, steps: int, folder: Path) -> Original:
    """Images of twice the size, by the mean over all pixels."""
    model = definitions(checkout / "super_resolution/model.py").Net(upscale_factor=2)
    program, batch = definitions(checkout / "super_resolution/main.py"), 16
    small, large = torch.rand(steps * batch, 1, 16, 16), torch.rand(steps * batch, 1, 32, 32)
    save_start(folder, model, inputs=small, targets=large)
    _set(program, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), device=torch.device("cpu"))
    _set(program, criterion=nn.MSELoss(), training_data_loader=loader(small, large, batch=batch))
    with in_folder(folder), recorded_backwards() as found:
        program.train(1)
    return Original({"loss": found.losses}, found.seconds_per_step(1))


def gcn(checkout: Path, steps: int, folder: Path) -> Original:
    """The whole graph is one sample, its adjacency a sparse tensor."""
    program = definitions(checkout / "gcn/main.py")
    nodes, features, classes = 400, 64, 7
    inputs, targets = torch.rand(nodes, features), torch.randint(classes, (nodes,))
    edges = (torch.rand(nodes, nodes) < 0.01).float() + torch.eye(nodes)
    adjacency = (edges / edges.sum(1, keepdim=True)).to_sparse()
    train, validation = torch.randperm(nodes).split([300, 100])
    model = program.GCN(features, 16, classes, use_bias=False, dropout_p=0.0)
    save_start(
        folder, model, features=inputs[None], edges=adjacency.to_dense()[None], targets=targets[None], mask=train[None]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    with in_folder(folder), recorded_backwards() as found:
        for step in range(steps):
            graph = (inputs, adjacency)
            program.train_iter(step, model, optimizer, nn.NLLLoss(), graph, targets, train, validation, NEVER)
    return Original({"loss": found.losses}, found.seconds_per_step(1))


def dcgan(checkout: Path, steps: int, folder: Path) -> Original:
    """A flat script: two networks, and three calls of backward in a step. Its noise is that of the samples.

    In double precision: in single precision, the rounding of two equal programs grows past 1e-5 within 13 steps.
    """
    path, batch, channels = checkout / "dcgan/main.py", 16, 3
    program = definitions(path)
    _set(program, nz=16, ngf=8, ndf=8, nc=channels, ngpu=1, device=torch.device("cpu"), real_label=1, fake_label=0)
    generator, discriminator = program.Generator(1).double(), program.Discriminator(1).double()
    generator.apply(program.weights_init)
    discriminator.apply(program.weights_init)
    images = 2 * torch.rand(steps * batch, channels, 64, 64, dtype=torch.float64) - 1
    noise = torch.randn(steps * batch, 16, 1, 1, dtype=torch.float64)
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    save_start(folder, both, inputs=images, noise=noise)
    options = {"lr": 2e-4, "betas": (0.5, 0.999)}
    _set(program, netG=generator, netD=discriminator, criterion=nn.BCELoss(), fixed_noise=noise[:batch])
    _set(program, optimizerG=torch.optim.Adam(generator.parameters(), **options))
    _set(program, optimizerD=torch.optim.Adam(discriminator.parameters(), **options))
    _set(program, dataloader=loader(images, images, batch=batch), vutils=mock.Mock())  # vutils: saves images
    _set(program, opt=SimpleNamespace(niter=1, dry_run=False, outf="."))
    draws = mock.patch.object(torch, "randn", side_effect=noise.split(batch))
    with in_folder(folder), recorded_backwards() as found, draws:
        run_last_loop(path, program)
    steps_of_three = found.of_step(3)
    losses = {
        "discriminator/loss": [real + fake for real, fake, _ in steps_of_three],
        "generator/loss": [fooled for _, _, fooled in steps_of_three],
    }
    return Original(losses, found.seconds_per_step(3))


def word_language_model(checkout: Path, steps: int, folder: Path) -> Original:
    """An LSTM whose state is carried from batch to batch, with clipping and SGD by hand."""
    program = definitions(checkout / "word_language_model/main.py")
    tokens, columns, length = 50, 8, 10
    build = definitions(checkout / "word_language_model/model.py").RNNModel
    model = build("LSTM", tokens, 32, 32, 2, dropout=0.0)
    text = torch.randint(tokens, (steps * length + 1, columns))
    chunks = [text[first : first + length].t() for first in range(0, steps * length, length)]
    followers = [text[first + 1 : first + length + 1].t() for first in range(0, steps * length, length)]
    save_start(
        folder,
        model,
        inputs=torch.cat(chunks),
        targets=torch.cat(followers),
        column=torch.arange(columns).repeat(steps),
    )
    args = SimpleNamespace(model="LSTM", bptt=length, batch_size=columns, clip=0.25, log_interval=NEVER)
    args.use_optimizer = args.dry_run = False
    corpus = SimpleNamespace(dictionary=range(tokens))
    _set(program, model=model, criterion=nn.NLLLoss(), train_data=text, corpus=corpus, args=args, lr=2.0, epoch=1)
    with in_folder(folder), recorded_backwards() as found:
        program.train()
    return Original({"loss": found.losses}, found.seconds_per_step(1))


def time_sequence_prediction(checkout: Path, steps: int, folder: Path) -> None:
    """Sine waves; the loop is not run, since its optimizer is refused."""
    model = definitions(checkout / "time_sequence_prediction/train.py").Sequence().double()
    waves = torch.sin(torch.rand(8, 1, dtype=torch.float64) + torch.arange(20) / 20)
    save_start(folder, model, inputs=waves[:, :-1], targets=waves[:, 1:])


def nanogpt(checkout: Path, steps: int, folder: Path) -> Original:
    """The whole of train.py, on a text of random characters; its micro-batches of a step are two."""
    calls = 2
    text = folder / "data/random"
    text.mkdir(parents=True)
    letters = torch.randint(65, (20_000,), dtype=torch.uint16)
    for split in ("train", "val"):
        (text / f"{split}.bin").write_bytes(letters.numpy().tobytes())
    (text / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    (folder / "configurator.py").symlink_to(checkout.resolve() / "configurator.py")
    options = (
        "dataset=random", "device=cpu", "compile=False", "dtype='float32'", "n_layer=2", "n_head=2", "n_embd=64",
        "block_size=32", "batch_size=8", f"gradient_accumulation_steps={calls}", f"max_iters={steps - 1}",
        "warmup_iters=5", "lr_decay_iters=20", "learning_rate=1e-3", "min_lr=1e-4", f"eval_interval={NEVER}",
        "eval_iters=1", f"log_interval={NEVER}",
    )  # fmt: skip
    batches: list[tuple[Tensor, Tensor]] = []

    def record(module: nn.Module, inputs: Any) -> None:
        if type(module).__name__ != "GPT":
            return
        if not batches:
            torch.save(module.state_dict(), folder / "start.pt")
        if module.training:
            batches.append(inputs)

    program = {"__name__": "__main__"}
    arguments = ["train.py", *(f"--{option}" for option in options)]
    with (
        in_folder(folder),
        recorded_backwards() as found,
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", [str(checkout), *sys.path]),
    ):
        hook = nn.modules.module.register_module_forward_pre_hook(record)
        try:
            exec(compile((checkout / "train.py").read_text(), "train.py", "exec"), program)
        finally:
            hook.remove()
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    torch.save({"inputs": inputs, "targets": targets}, folder / "samples.pt")
    return Original({"loss": [sum(parts) for parts in found.of_step(calls)]}, found.seconds_per_step(calls))


def _set(program: ModuleType, **names: Any) -> None:
    """What the script's own statements would have assigned."""
    vars(program).update(names)
