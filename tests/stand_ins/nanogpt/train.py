"""In the shape of nanoGPT: a flat script, whose globals a second file changes by the command line."""

import math
import os
import pickle

import numpy as np
import torch
from model import GPT, GPTConfig

dataset, batch_size, block_size, gradient_accumulation_steps = "text", 12, 32, 5
n_layer = n_head = n_embd = 1
learning_rate, min_lr, warmup_iters, lr_decay_iters, max_iters = 1e-3, 1e-4, 5, 20, 100
exec(open("configurator.py").read())

torch.manual_seed(1337)
folder = os.path.join("data", dataset)
text = np.fromfile(os.path.join(folder, "train.bin"), dtype=np.uint16).astype(np.int64)
with open(os.path.join(folder, "meta.pkl"), "rb") as file:
    vocab_size = pickle.load(file)["vocab_size"]


def get_batch():
    starts = torch.randint(len(text) - block_size, (batch_size,))
    chunks = torch.stack([torch.from_numpy(text[start : start + block_size + 1]) for start in starts])
    return chunks[:, :-1], chunks[:, 1:]


def get_lr(step):
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    ratio = min(1.0, (step - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd))
optimizer = model.configure_optimizers(1e-1, learning_rate, (0.9, 0.95), "cpu")
for step in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    for _ in range(gradient_accumulation_steps):
        _logits, loss = model(*get_batch())
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
