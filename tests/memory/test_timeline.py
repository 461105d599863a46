import numpy as np
import torch

from trainapp.memory import timeline
from trainapp.memory.categories import Category
from trainapp.memory.live_tensors import LiveTensors


def test_the_picture_stacks_what_was_counted():
    counter = LiveTensors()
    weights = torch.zeros(100, requires_grad=True)
    counter.register({Category.PARAMETERS: [weights]})
    with counter:
        (weights * torch.zeros(100)).sum().backward()
        counter.label(Category.GRADIENTS, weights.grad)
    series = timeline.stacked(counter.events, counter.kinds)
    total = sum(series.values())
    assert (int(total.max()), int(total[-1])) == (counter.peak, counter.live)
    assert set(np.unique(series[Category.PARAMETERS])) == {400}
    assert series[Category.GRADIENTS][-1] == 400
    assert all((values >= 0).all() for values in series.values())
