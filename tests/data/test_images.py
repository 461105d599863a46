"""data=images: finding, decoding and augmenting, and that a sample is a function of (seed, epoch, index) alone."""

import os
import shutil

import numpy as np
import pytest
import runs
import torch
from helpers import ROOT, evaluations, metrics, result, run_cli, train
from image_folders import COLOURS, fill, image, splits
from markdown import commands
from PIL import Image

from trainapp.data.loader import Fetcher, Request
from trainapp.data.sets import images as module
from trainapp.data.sets.images import Images
from trainapp.errors import UserError
from trainapp.rng import CPU, seed_from

DOCUMENT = ROOT / "docs/images.md"
# A vision transformer on tiny images, with all that is random.
TINY = ("model=vit", "model.depth=2", "model.width=16", "model.heads=2", "model.patch_size=4", "data=images",
        "data.image_size=8", "data.mixup=0.4", "data.cutmix=1.0", "data.num_workers=0", "batch.global_size=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return splits(tmp_path_factory.mktemp("images"))


def open_images(path, split="train", **settings):
    return Images(split, str(path), **{"image_size": 8, **settings})


def drawn(data, index, seed=0):
    seed_from(CPU, seed, 0, index)
    return data[index]


# Finding


def names(data):
    paths = [os.fsdecode(path) for path in data._files]
    root = data.path if data.class_names[0] in os.listdir(data.path) else os.path.dirname(os.path.dirname(paths[0]))
    return [os.path.relpath(path, root) for path in paths]


def test_nested_folders_links_hidden_and_other_files(tmp_path):
    root = fill(tmp_path / "root", 2)
    deep = root / "blue" / "a" / "b"
    deep.mkdir(parents=True)
    image((1, 2, 3)).save(deep / "deep.JPEG", "jpeg")
    (root / "green" / "link.png").symlink_to(root / "red" / "0.png")
    (root / "red" / "notes.txt").write_text("not an image")
    (root / "red" / ".hidden.png").write_text("left by a file manager")
    (root / ".cache").mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.move(root / "red", tmp_path / "elsewhere" / "red")
    (root / "red").symlink_to(tmp_path / "elsewhere" / "red")
    data = open_images(root, val_fraction=0.0)
    assert data.class_names == ["blue", "green", "red"]
    assert data.targets.tolist() == [0] * 3 + [1] * 3 + [2] * 2
    assert names(data) == [
        *("blue/0.png", "blue/1.png", "blue/a/b/deep.JPEG"),
        *("green/0.png", "green/1.png", "green/link.png", "red/0.png", "red/1.png"),
    ]


def test_train_may_be_a_class(tmp_path):
    """Of which there are images; a folder of classes is a split, whatever is beside it."""
    fill(tmp_path / "classes", 2)
    (tmp_path / "classes/green").rename(tmp_path / "classes/train")
    assert open_images(tmp_path / "classes").class_names == ["blue", "red", "train"]
    (splits(tmp_path / "splits", 2, 1) / "notes").mkdir()
    assert open_images(tmp_path / "splits").class_names == ["blue", "green", "red"]
    assert len(open_images(tmp_path / "splits", "val")) == 3


def test_a_seeded_split_is_of_each_class_and_stays_when_images_are_added(tmp_path):
    root = fill(tmp_path, 10)
    parts = {split: set(names(open_images(root, split, val_fraction=0.3))) for split in ("train", "val")}
    assert parts["train"] & parts["val"] == set()
    assert len(parts["train"]) == 21
    assert {name: sum(path.startswith(name) for path in parts["val"]) for name in COLOURS} == dict.fromkeys(COLOURS, 3)
    assert parts["val"] != set(names(open_images(root, "val", val_fraction=0.3, split_seed=1)))
    fill(root, 1, first=10)
    after = set(names(open_images(root, "val", val_fraction=3 / 11)))
    assert len(after & parts["val"]) >= 6  # at most the new one takes a place in each class
    assert len(open_images(root, "val", val_fraction=1.0)) == 33
    assert len(open_images(root, "train", val_fraction=0.99)) == 3  # one each


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda root: shutil.rmtree(root), {}, r"data\.path=.*: there is no such folder, searched from /"),
        (lambda root: shutil.rmtree(root / "train") or (root / "train").mkdir(), {}, "has no folders; each class"),
        (lambda root: (root / "train" / "empty").mkdir(), {}, r"no images in the class folders empty of .*train; rem"),
        (lambda root: (root / "val" / "violet").mkdir(), {}, r"violet of .*val is unknown to the training"),
        (
            lambda root: None,
            {"classes": ["red", "pink"]},
            r"data\.classes=\['red', 'pink'\]: must name folders of .*train, each once: blue, green, red",
        ),
        (lambda root: None, {"classes": ["red", "red"]}, r"data\.classes=\['red', 'red'\]: must name folders"),
        (lambda root: None, {"scale": (0.9, 0.1)}, r"data\.scale=\[0\.9, 0\.1\]: the smallest share must not be above"),
    ],
)
def test_a_folder_that_does_not_fit_has_one_message(tmp_path, change, settings, message):
    root = splits(tmp_path / "root", 2, 1)
    change(root)
    with pytest.raises(UserError, match=message):
        (open_images(root, **settings), open_images(root, "val", **settings))


# Decoding

RED = [200, 40, 30]


def kinds():
    """Pictures whose every pixel is RED or a grey of 100, in all the ways of storing them."""
    rgb = Image.new("RGB", (6, 6), tuple(RED))
    sixteen = Image.fromarray(np.full((6, 6), 100 * 256 + 17, dtype=np.uint16))
    yield "bits.png", Image.new("1", (6, 6), 1), [255] * 3
    yield "palette.gif", rgb.quantize(4), RED
    yield "cmyk.tif", rgb.convert("CMYK"), RED
    yield "cmyk.jpg", rgb.convert("CMYK"), RED
    yield "clear.png", Image.new("RGBA", (6, 6), (*RED, 0)), [255] * 3
    yield "half.png", Image.new("RGBA", (6, 6), (0, 0, 0, 128)), [127] * 3
    yield "grey alpha.png", Image.new("LA", (6, 6), (100, 255)), [100] * 3
    yield "sixteen.png", sixteen, [100] * 3
    yield "sixteen.tif", sixteen, [100] * 3


@pytest.mark.parametrize(("name", "picture", "expected"), [pytest.param(*kind, id=kind[0]) for kind in kinds()])
def test_every_kind_of_picture_becomes_rgb(tmp_path, name, picture, expected):
    picture.save(tmp_path / name)
    read = module.read(str(tmp_path / name))
    assert read.mode == "RGB"
    assert read.size == (6, 6)
    assert np.abs(np.asarray(read).astype(int) - expected).max() <= (3 if name.endswith("jpg") else 1)


@pytest.mark.parametrize("orientation", [1, 2, 6])
def test_pictures_are_upright(tmp_path, orientation):
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[0, :2] = 255  # no symmetry
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    read = np.asarray(module.read(str(tmp_path / "a.png")))
    assert np.array_equal(read, {1: pixels, 2: pixels[:, ::-1], 6: np.rot90(pixels, -1)}[orientation])


def test_pixels_are_normalised_and_evaluation_sees_the_centre(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        picture = Image.new("RGB", (32, 16), (0, 0, 0))
        picture.paste((51, 102, 255), (9, 1, 23, 15))  # the central 14 of 16
        picture.save(tmp_path / name / "0.png")
    data = open_images(tmp_path, "val", val_fraction=1.0)
    sample = data[1]
    expected = (torch.tensor([0.2, 0.4, 1.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    # At the border, the filter of the resize reaches beyond the crop.
    assert torch.allclose(sample["inputs"][:, 1:-1, 1:-1], expected[:, None, None].expand(3, 6, 6), atol=1e-6)
    assert sample["inputs"].dtype == torch.float32
    assert sample["targets"] == 1


# Augmentation


def test_random_crops_keep_to_area_and_shape():
    np.random.seed(0)
    boxes = np.array([module.random_box(200, 100, (0.25, 0.5)) for _ in range(500)])
    widths, heights = (boxes[:, 2:] - boxes[:, :2]).T
    shares, shapes = widths * heights / 20_000, widths / heights
    assert boxes.min() >= 0
    assert (boxes.max(0) <= [200, 100, 200, 100]).all()
    assert [shares.min(), shares.max()] == pytest.approx([0.25, 0.5], abs=0.02)
    assert [shapes.min(), shapes.max()] == pytest.approx([0.75, 1.33], abs=0.04)
    assert module.random_box(1000, 2, (1.0, 1.0)) == (499, 0, 501, 2)  # no such crop: the centre


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_shares_of_the_classes_are_those_of_the_pixels(folder, way):
    """Each class has one colour, without noise once averaged: red is where there is most red."""
    data = open_images(folder, **{way: 1.0}, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    colours = torch.tensor(list(COLOURS.values())) / 255
    found = []
    for index in range(len(data)):
        sample = drawn(data, index)
        shares = sample["targets"]
        assert shares.dtype == torch.float32
        assert float(shares.sum()) == pytest.approx(1)
        assert torch.allclose(sample["inputs"].mean((1, 2)), shares @ colours, atol=0.12)
        found.append(float(shares.max()))
    assert any(share < 0.95 for share in found)
    assert len(set(found)) > 5


# A sample is a function of (seed, epoch, index)


def fetched(data, seed=0, epoch=0, indices=(1, 9, 17)):
    return Fetcher(data, seed)[Request(epoch, list(indices))]


def test_a_sample_depends_on_seed_epoch_and_index_alone(folder):
    data = open_images(folder, mixup=0.4, cutmix=1.0)
    together = fetched(data)
    torch.manual_seed(123)
    np.random.seed(5)
    alone = [fetched(open_images(folder, mixup=0.4, cutmix=1.0), indices=[index]) for index in (1, 9, 17)]
    for key in ("inputs", "targets"):
        assert torch.equal(together[key], torch.cat([sample[key] for sample in alone]))
    for other in (fetched(data, seed=1), fetched(data, epoch=1)):
        assert not torch.equal(together["inputs"], other["inputs"])
        assert not torch.equal(together["targets"], other["targets"])


# Files that cannot be read


def spoil(root, *relative):
    for name in relative:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: len(content) // 2])


def test_a_broken_file_is_named_and_the_next_one_takes_its_place(tmp_path, caplog):
    root = splits(tmp_path / "root", 4, 2)
    spoil(root, "train/green/1.png", "train/green/2.jpg", "val/red/5.jpg")
    (root / "train/red/9.png").write_text("no image at all")
    (root / "train/red/gone.png").symlink_to("nowhere.png")
    data = open_images(root, on_error="skip")
    data.is_training = False  # the same pixels whenever a file is read
    assert len(data) == 14
    places = names(data)
    broken, next_one = places.index("green/1.png"), places.index("green/3.jpg")
    assert torch.equal(data[broken]["inputs"], data[next_one]["inputs"])
    assert not torch.equal(data[broken]["inputs"], data[0]["inputs"])
    last = data[13]  # red/gone.png, after it the first one
    assert torch.equal(last["inputs"], data[0]["inputs"])
    assert last["targets"] == 0
    assert torch.equal(data[broken]["inputs"], data[next_one]["inputs"])
    for name in ("green/1.png", "green/2.jpg", "red/gone.png"):
        assert caplog.text.count(f"{name} cannot be read as an image (") == 1  # once, however often it is fetched
    assert "(3 so far)" in caplog.text
    stops = r"data\.on_error=stop: .*red/9\.png cannot be read as an image \(UnidentifiedImageError: cannot identify"
    with pytest.raises(UserError, match=stops):
        open_images(root)[places.index("red/9.png")]
    for path in (root / "val").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the 6 images can be read; the last one: .*\.jpg cannot be read"):
        open_images(root, "val", on_error="skip")[3]


# The command line


@pytest.mark.slow
def test_the_commands_of_the_documentation(tmp_path):
    root = splits(tmp_path / "FOLDER")
    fill(tmp_path / "TEST", 2)
    spoil(root, "train/green/1.png")
    model = ("model.depth=1", "model.width=16", "model.heads=2", "data.num_workers=2")
    small = ("train.max_epochs=2", "batch.global_size=8", "every.log=1", "train.device=cpu")
    (_, *first), (_, *second) = commands(DOCUMENT)
    done = train(tmp_path / "run", *first, *model, *small)
    assert [line["samples"] for line in metrics(tmp_path / "run")] == [8, 16, 24, 32, 40, 48]
    assert (tmp_path / "run/metrics.csv").exists()
    assert done.stderr.count("FOLDER/train/green/1.png cannot be read as an image") == 1
    assert 0 <= evaluations(tmp_path / "run")[-1]["accuracy"] <= 1
    (root / "train/green/1.png").unlink()
    train(tmp_path / "tested", *second, *model, *small)
    assert {"accuracy", "test/accuracy"} < set(result(tmp_path / "tested")["evaluation"])


@pytest.mark.slow
def test_a_broken_file_ends_a_run_with_one_message_also_from_a_worker(tmp_path):
    root = splits(tmp_path / "FOLDER", 4, 2)
    for path in (root / "train").rglob("*.png"):
        path.write_text("no image")
    done = run_cli(*TINY, "data.path=FOLDER", "data.num_workers=1", "train.device=cpu", cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("trainapp: data.on_error=stop: FOLDER/train/")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_class_names_are_kept_and_other_ones_refused(tmp_path):
    root = splits(tmp_path / "root", 4, 2)
    run = (*TINY, f"data.path={root}", "train.max_steps=1", "every.save=1")
    runs.run(tmp_path / "run", *run)
    assert runs.saved(tmp_path / "run", 1)["class_names"] == ["blue", "green", "red"]
    for part in ("train", "val"):
        (root / part / "blue").rename(root / part / "sky")
    with pytest.raises(
        UserError, match=r"class names have changed since it was saved: blue \(now green\), green \(now red\)"
    ):
        runs.run(tmp_path / "run", *run, "train.max_steps=2")
    with pytest.raises(UserError, match=r"data\.path=null: name the folder"):
        runs.run(tmp_path / "other", *TINY)
    other = fill(tmp_path / "test", 1)
    with pytest.raises(UserError, match=r"eval\.test\._target_=.*: its classes are blue, green, red, but those of the"):
        runs.run(
            tmp_path / "third", *run, "+data@eval.test=images", f"eval.test.path={other}", "eval.test.val_fraction=1"
        )
