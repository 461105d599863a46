import copy
import types

import pytest
import torch

from trainapp.errors import UserError
from trainapp.models import gpt
from trainapp.models.gpt import GPT, Attention, Rotary


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))


def small(**settings) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 50, "context_length": 16, "depth": 2, "width": 32, **settings})


def test_parameter_count():
    model = GPT(vocab_size=256, context_length=128)
    # 8/3 x 128 = 341, to the nearest multiple of 32: 352
    block = 128 * 3 * 128 + 128 * 128 + 3 * 128 * 352 + 2 * 128
    assert sum(p.numel() for p in model.parameters()) == 256 * 128 + 4 * block + 128
    assert model.blocks() == list(model.layers)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_a_token_changes_no_logits_before_it(tokens, kv_heads):
    model = small(kv_heads=kv_heads)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_without_the_causal_mask_a_token_does_change_them(tokens, monkeypatch):
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        gpt.F, "scaled_dot_product_attention", lambda *args, **kw: real(*args, **{**kw, "is_causal": False})
    )
    model = small()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    assert (model(tokens)[:, :7] - model(changed)[:, :7]).abs().max() > 1e-4


def test_rotary_scores_depend_on_the_distance_only():
    rotary = Rotary(head_size=16, context_length=512, base=10000.0)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 16, generator=generator)
    scores = rotary(query.expand(1, 1, 512, 16))[0, 0] @ rotary(key.expand(1, 1, 512, 16))[0, 0].T
    for distance in (0, 1, 100):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (scores.diagonal(0)[0] - scores.diagonal(-1)[0]).abs() > 1e-2
    assert torch.equal(rotary(query.expand(1, 1, 1, 16))[0, 0, 0], query)


def test_rotary_tables_are_float32_and_not_in_the_state_dict(tokens):
    model = small().to(torch.bfloat16)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert model.rotary.cos.dtype == model.rotary.sin.dtype == torch.float32
    assert torch.equal(model.rotary.cos, small().rotary.cos)
    assert model.embedding.weight.dtype == torch.bfloat16
    assert not [name for name in model.state_dict() if "cos" in name or "sin" in name]
    assert len(list(model.buffers())) == 2
    assert copy.deepcopy(model).layers[1].attention.rotary.cos.dtype == torch.float32


def test_rotary_rotates_in_float32_under_autocast(tokens):
    rotary = Rotary(head_size=8, context_length=16, base=10000.0)
    x = torch.randn(1, 2, 16, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary(x), rotary(x.float()).bfloat16())
        logits = small()(tokens)
    exact = small()(tokens)
    assert (logits - exact).norm() / exact.norm() < 0.02


def test_a_model_made_on_meta_is_the_same_after_init_weights(tokens):
    with torch.device("meta"):
        model = small()
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.init_weights()
    other = small()
    torch.manual_seed(1)
    other.init_weights()
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(tokens), other(tokens))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_equal_heads_with_repeated_keys_and_values(kv_heads, native, monkeypatch):
    monkeypatch.setattr(gpt, "_native_gqa", lambda query, mask: native)
    torch.manual_seed(0)
    rotary = Rotary(head_size=8, context_length=16, base=10000.0)
    grouped, full = Attention(32, 4, kv_heads, 0.0, rotary), Attention(32, 4, 4, 0.0, rotary)
    query, key, value = grouped.qkv.weight.split((32, 8 * kv_heads, 8 * kv_heads))
    repeat = [w.view(kv_heads, 8, 32).repeat_interleave(4 // kv_heads, 0).flatten(0, 1) for w in (key, value)]
    full.load_state_dict({"qkv.weight": torch.cat((query, *repeat)), "output.weight": grouped.output.weight})
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(grouped(x), full(x))
    tiled = [w.repeat(4 // kv_heads, 1) for w in (key, value)]  # the wrong order: equal only for one group
    full.load_state_dict({"qkv.weight": torch.cat((query, *tiled)), "output.weight": grouped.output.weight})
    assert torch.allclose(grouped(x), full(x), atol=1e-5) == (kv_heads == 1)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "mask", "expected"),
    [
        ("cpu", torch.float32, None, None, True),
        ("cuda", torch.float32, (8, 0), None, False),
        ("cuda", torch.bfloat16, (8, 0), None, True),
        ("cuda", torch.float16, (7, 5), None, False),  # only flash attention reads them, and it needs Ampere
        ("cuda", torch.float16, (9, 0), torch.ones(1, 1), False),  # nor does it take a mask
    ],
)
def test_where_kernels_read_shared_keys_and_values(monkeypatch, device, dtype, capability, mask, expected):
    """Elsewhere they are copied for each head: the kernel that is left would store all scores."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert gpt._native_gqa(query, mask) is expected


def test_initial_standard_deviations():
    model = small(width=256, depth=8)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.layers[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for projection in (model.layers[7].attention.output, model.layers[7].mlp.down):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)


def test_dropout_acts_in_training_only(tokens):
    model = small(dropout=0.2)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30, "heads": 4}, r"model\.width=30 must be divisible by model\.heads=4"),
        ({"heads": 4, "kv_heads": 3}, r"model\.heads=4 must be divisible by model\.kv_heads=3"),
        ({"heads": 4, "kv_heads": 8}, r"model\.heads=4 must be divisible by model\.kv_heads=8"),
        ({"width": 12, "heads": 4}, r"model\.width=12 over model\.heads=4 gives heads of size 3"),
    ],
)
def test_settings_that_do_not_divide(settings, message):
    with pytest.raises(ValueError, match=message):
        small(**settings)


# The cache of keys and values: the logits are those of a forward without it

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


def test_more_tokens_than_there_are_positions(model):
    message = r"model\.context_length=24: the batch has sequences of 25 tokens"
    with pytest.raises(UserError, match=message):
        model(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(UserError, match=message):
        in_parts(model, torch.zeros(1, 25, dtype=torch.int64), [20, 5])


def test_a_rotation_in_fp64_is_not_rounded_to_fp32():
    rotary = Rotary(head_size=8, context_length=16, base=10000.0)
    x = torch.linspace(0, 1, 32, dtype=torch.float64).sin().view(1, 1, 4, 8)
    rotated = rotary(x)
    assert rotated.dtype == torch.float64
    assert not torch.equal(rotated, rotated.float().double())
