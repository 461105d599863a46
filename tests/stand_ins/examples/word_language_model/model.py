"""A recurrent network that returns its state."""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, kind, tokens, embedding, hidden, layers, dropout=0.5):
        super().__init__()
        self.embed = nn.Embedding(tokens, embedding)
        self.rnn = getattr(nn, kind)(embedding, hidden, layers, dropout=dropout)
        self.head = nn.Linear(hidden, tokens)
        self.nlayers, self.nhid = layers, hidden

    def forward(self, tokens, state):
        outputs, state = self.rnn(self.embed(tokens), state)
        return torch.log_softmax(self.head(outputs).flatten(0, 1), -1), state

    def init_hidden(self, columns):
        return tuple(torch.zeros(self.nlayers, columns, self.nhid) for _ in range(2))
