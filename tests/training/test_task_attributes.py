"""What a task says of itself, as a function, an object, a `functools.partial` of either, checked or not."""

import functools

import pytest

from trainapp.losses import losses
from trainapp.losses.losses import attribute


class Embeds:
    """A loss that compares the samples of its batch, and offers their embeddings."""

    whole_batch = True

    def embed(self, model, batch):
        """The embeddings of a batch."""
        return model(batch)

    def loss_of_embeddings(self, embeddings, scale=1.0):
        """The loss of all of them."""
        return embeddings.sum() * scale, len(embeddings), {}

    def __call__(self, model, batch, scale=1.0):
        """The loss of a batch."""
        return self.loss_of_embeddings(self.embed(model, batch), scale)


def function(model, batch):
    """A loss whose attributes are set on it and on what is made of it."""


own = functools.partial(function)
own.whole_batch = True


@pytest.mark.parametrize("task", [Embeds(), functools.partial(Embeds(), scale=0.5)])
def test_embeddings(task):
    assert losses.compares_samples(task)
    assert losses.has_embeddings(task)
    checked = losses.checked(task, "task=own")
    assert losses.has_embeddings(checked)
    assert callable(checked.loss_of_embeddings)


def test_attributes_of_a_partial_come_before_those_of_its_function():
    assert losses.compares_samples(own)
    assert losses.needs_whole_batch(losses.checked(own, "task=own"))
    assert not losses.compares_samples(function)
    assert attribute(functools.partial(own), "whole_batch") is True
    assert attribute(own, "split") is None


def test_tokens_are_counted_in_chunks_too():
    assert losses.counts_tokens(losses.in_chunks(losses.next_token, 64))
    assert losses.counts_tokens(functools.partial(losses.next_token))
    assert not losses.counts_tokens(losses.in_chunks(losses.classification, 64))
