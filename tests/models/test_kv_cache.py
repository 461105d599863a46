"""The GPT's cache of keys and values: the logits are those of a forward without it."""

import pytest
import torch

from trainapp.models.gpt import GPT

TOLERANCE = 1e-5


@pytest.fixture(params=[4, 2], ids=["own", "shared"])
def model(request):
    """With keys and values of its own for each head, and shared ones. Larger weights, so that errors show."""
    torch.manual_seed(0)
    made = GPT(vocab_size=40, context_length=24, depth=3, width=32, heads=4, kv_heads=request.param, dropout=0.5)
    for parameter in made.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    return made.eval()


def in_parts(model, tokens, parts):
    """Logits of all positions, from forwards of so many tokens each."""
    cache = model.new_cache(tokens.shape[1])
    with torch.inference_mode():
        return torch.cat([model(piece, cache=cache) for piece in tokens.split(parts, dim=1)], dim=1)


@pytest.mark.parametrize("parts", [[24], [1] * 24, [7, 1, 1, 9, 1, 5]], ids=["whole", "one", "some"])
def test_the_same_logits(model, parts):
    tokens = torch.randint(40, (3, 24))
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(in_parts(model, tokens, parts), expected, rtol=0, atol=TOLERANCE)


def test_a_wrong_position_shows(model, monkeypatch):
    """The control: with rotary positions that begin anew, the logits differ by much more."""
    tokens = torch.randint(40, (3, 24))
    with torch.no_grad():
        expected = model(tokens)
    rotate = type(model.rotary).forward
    monkeypatch.setattr(type(model.rotary), "forward", lambda self, x, start=0: rotate(self, x))
    assert (in_parts(model, tokens, [7, 17]) - expected).abs().max() > 1000 * TOLERANCE


def test_no_room(model):
    cache = model.new_cache(5)
    with torch.no_grad(), pytest.raises(ValueError, match="room for 5 tokens, and 6"):
        model(torch.zeros(1, 6, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=r"20 tokens in the cache and 5 more are longer than model\.context_length=24"):
        in_parts(model, torch.zeros(1, 25, dtype=torch.int64), [20, 5])
