import pytest
import torch
from torch.nn import functional as F

from trainapp.models.vit import Attention, ViT, auto_patch

TINY = {"image_shape": (3, 8, 8), "num_classes": 5, "depth": 2, "width": 16, "heads": 2, "patch_size": 4}


@pytest.fixture
def vit():
    torch.manual_seed(0)
    return ViT(**TINY).double()


def test_attention_is_that_of_its_formula():
    torch.manual_seed(0)
    attention = Attention(8, 2, 0.0).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=-1)
    mixed = [
        torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v  # heads of size 4
        for q, k, v in zip(query.chunk(2, -1), key.chunk(2, -1), value.chunk(2, -1), strict=True)
    ]
    assert torch.allclose(attention(x), attention.output(torch.cat(mixed, -1)), atol=1e-12)


def test_patches_keep_their_pixels_and_their_places(vit):
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    patches = F.unfold(images, 4, stride=4).transpose(1, 2)  # [B, N, C * size * size]
    weight, bias = vit.embedding.weight.flatten(1), vit.embedding.bias
    x = patches @ weight.T + bias + vit.positions
    for block in vit.blocks():
        x = block(x)
    assert torch.allclose(vit(images), vit.head(vit.norm(x).mean(1)), atol=1e-12)
    exchanged = torch.cat((images[..., 4:], images[..., :4]), -1)
    assert not torch.allclose(vit(images), vit(exchanged))
    with torch.no_grad():
        vit.positions.zero_()  # without them, the mean does not tell where a patch was
    assert torch.allclose(vit(images), vit(exchanged), atol=1e-12)


def test_initial_values(vit):
    assert vit.layers[0].attention.qkv.weight.detach().std() == pytest.approx(0.02, rel=0.15)
    assert vit.embedding.weight.detach().std() == pytest.approx((3 * 16) ** -0.5, rel=0.15)
    assert not vit.head.bias.any()
    before = vit.positions.clone()
    torch.manual_seed(1)
    vit.init_weights()
    assert not torch.equal(before, vit.positions)
    assert len(vit.blocks()) == 2


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(224, 224, 16), (96, 96, 12), (64, 64, 8), (32, 32, 4), (28, 28, 4), (8, 8, 1), (5, 5, 1), (14, 224, 7)],
)
def test_automatic_patches_divide_the_image(height, width, size):
    assert auto_patch(height, width) == size
    assert height % size == width % size == 0


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"model\.patch_size=3: must divide the image's 8 x 8 pixels"):
        ViT(**TINY | {"patch_size": 3})
    with pytest.raises(ValueError, match=r"model\.width=16 must be divisible by model\.heads=3"):
        ViT(**TINY | {"heads": 3})
