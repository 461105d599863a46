import pytest
import torch
from torch import nn

from trainapp.errors import UserError
from trainapp.models.resnet import ResNet


@pytest.mark.parametrize(
    ("depth", "count", "blocks", "entries"),
    [
        (18, 11_689_512, 8, 122),
        (34, 21_797_672, 16, 218),
        (50, 25_557_032, 16, 320),
        (101, 44_549_160, 33, 626),
        (152, 60_192_808, 50, 932),
    ],
)
def test_sizes_are_torchvisions(depth, count, blocks, entries):
    with torch.device("meta"):
        model = ResNet((3, 224, 224), 1000, depth=depth)
    assert sum(p.numel() for p in model.parameters()) == count
    assert len(model.blocks()) == blocks
    assert len(model.state_dict()) == entries


def test_names_and_shapes_are_torchvisions():
    with torch.device("meta"):
        shapes = {n: list(t.shape) for n, t in ResNet((3, 224, 224), 1000, depth=50).state_dict().items()}
    expected = {
        "conv1.weight": [64, 3, 7, 7],
        "bn1.weight": [64],
        "bn1.running_mean": [64],
        "bn1.num_batches_tracked": [],
        "layer1.0.bn3.running_var": [256],
        "layer1.0.downsample.0.weight": [256, 64, 1, 1],
        "layer1.0.downsample.1.bias": [256],
        "layer3.5.conv2.weight": [256, 256, 3, 3],
        "layer4.2.conv3.weight": [2048, 512, 1, 1],
        "fc.weight": [1000, 2048],
        "fc.bias": [1000],
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert "layer1.1.downsample.0.weight" not in shapes


@pytest.mark.parametrize(
    ("shape", "stem", "sizes"),
    [
        ((1, 8, 8), "auto", [8, 4, 2, 1]),
        ((3, 63, 63), "auto", [63, 32, 16, 8]),
        ((3, 64, 64), "auto", [16, 8, 4, 2]),
        ((3, 32, 32), "large", [8, 4, 2, 1]),
        ((3, 64, 64), "small", [64, 32, 16, 8]),
    ],
)
def test_stem_sets_the_sizes_of_the_stages(shape, stem, sizes):
    model = ResNet(shape, 10, width=4, stem=stem).eval()
    seen = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda m, args, out: seen.append(out.shape[-1]))
    assert model(torch.randn(2, *shape)).shape == (2, 10)
    assert seen == sizes


def test_initialisation():
    torch.manual_seed(0)
    model = ResNet((3, 32, 32), 10, depth=50, width=32)
    # fan-out kaiming: std = sqrt(2 / (channels out x kernel area))
    weight = model.layer4[1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("depth", [18, 50])
def test_blocks_start_as_the_identity(depth):
    model = ResNet((3, 32, 32), 10, depth=depth, width=8)
    block = model.layer1[1]
    x = torch.rand(2, 8 if depth == 18 else 32, 8, 8)
    assert torch.equal(block(x), x)
    nn.init.ones_((block.bn2 if depth == 18 else block.bn3).weight)
    assert not torch.equal(block(x), x)


def test_group_norm_is_independent_of_the_micro_batch_and_batch_norm_is_not():
    x = torch.randn(8, 1, 16, 16)
    difference = {}
    for norm in ("group", "batch"):
        torch.manual_seed(0)
        model = ResNet((1, 16, 16), 10, norm=norm, width=8)
        for block in model.blocks():  # otherwise the blocks pass their input through
            nn.init.ones_(block.bn2.weight)
        whole, halves = model(x), torch.cat([model(x[:4]), model(x[4:])])
        difference[norm] = ((whole - halves).norm() / whole.norm()).item()
    assert difference["group"] < 1e-5
    assert difference["batch"] > 1e-2


@pytest.mark.parametrize(("width", "groups"), [(64, 32), (16, 16), (24, 8), (7, 1)])
def test_group_norm_takes_any_width(width, groups):
    model = ResNet((1, 8, 8), 10, norm="group", width=width)
    assert model.bn1.num_groups == groups
    assert model(torch.randn(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize(
    ("norm", "size", "width", "smallest"),
    [("batch", 8, 8, 2), ("batch", 9, 8, 1), ("group", 8, 8, 1), ("group", 8, 4, 2), ("group", 9, 4, 1)],
)
def test_a_last_stage_of_one_value_needs_two_samples(norm, size, width, smallest):
    """With groups only where each is a channel: of 32 channels in 32 groups."""
    model = ResNet((1, size, size), 10, norm=norm, width=width)
    assert model.smallest_micro_batch == smallest
    assert model(torch.randn(smallest, 1, size, size)).shape == (smallest, 10)
    if norm == "batch":
        assert model.eval()(torch.randn(1, 1, size, size)).shape == (1, 10)
    if smallest == 2:
        with pytest.raises(UserError, match=rf"model\.norm={norm} with images of 8 x 8 pixels: .* model\.norm=group"):
            model.train()(torch.randn(1, 1, size, size))
        model.smallest_micro_batch = 1  # torch itself refuses it
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model(torch.randn(1, 1, size, size))
