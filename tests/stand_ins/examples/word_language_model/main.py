"""In the shape of pytorch/examples: state carried from chunk to chunk, and SGD by hand."""

import model as networks  # a file beside this one
import torch

model = networks.RNNModel("LSTM", 50, 32, 32, 2)


def train():
    model.train()
    state = model.init_hidden(args.batch_size)
    for first in range(0, len(train_data) - 1, args.bptt):
        model.zero_grad()
        state = tuple(part.detach() for part in state)
        logarithms, state = model(train_data[first : first + args.bptt], state)
        loss = criterion(logarithms, train_data[first + 1 : first + 1 + args.bptt].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-lr)


train()
