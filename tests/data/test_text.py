import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from trainapp.data.sets.text import Text
from trainapp.errors import UserError


@pytest.fixture
def corpus(tmp_path):
    """Two files, 1,000 and 500 random bytes: every value occurs."""
    folder = tmp_path / "corpus" / "deeper"
    folder.mkdir(parents=True)
    content = np.random.default_rng(0).integers(0, 256, 1500, dtype=np.uint8).tobytes()
    (tmp_path / "corpus" / "a.txt").write_bytes(content[:1000])
    (folder / "b.txt").write_bytes(content[1000:])
    return tmp_path / "corpus", content


def joined(data):
    """The bytes in the windows of a split, rejoined."""
    batch = data.__getitems__(range(len(data)))
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert torch.equal(batch["inputs"][1:, 0], batch["targets"][:-1, -1])
    tokens = [*batch["inputs"].flatten().tolist(), batch["targets"][-1, -1].item()]
    return bytes(tokens)


def test_windows_put_together_are_the_files(corpus):
    folder, content = corpus
    train, val = (Text(split, files=f"{folder}/**/*.txt", context_length=16) for split in ("train", "val"))
    # 1350 bytes are (1350 - 1) // 16 = 84 windows and 5 bytes left over, 150 are 9 and 5.
    assert (len(train), len(val)) == (84, 9)
    assert joined(train) == content[: 84 * 16 + 1]
    assert joined(val) == content[1350 : 1350 + 9 * 16 + 1]
    assert train.spec == {"vocab_size": 256, "context_length": 16}
    assert (train.task, train.in_memory) == ("next_token", True)


def test_files_keep_their_order_and_count_once(corpus):
    folder, content = corpus
    a, b = str(folder / "a.txt"), str(folder / "deeper" / "b.txt")
    data = Text("train", files=[b, f"{folder}/**/*.txt", a], context_length=1, val_fraction=0.0)
    assert joined(data) == content[1000:] + content[:1000]
    literal = folder / "odd[1].txt"
    literal.write_bytes(b"a file whose name looks like a pattern")
    data = Text("train", files=str(literal), context_length=1, val_fraction=0.0)
    assert joined(data) == literal.read_bytes()


def test_standard_library_by_default():
    data = Text("train")
    expected = b"".join(p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    size = len(expected) - int(len(expected) * 0.1)
    assert len(data) == (size - 1) // 128 > 5000
    assert bytes(data[1000]["inputs"].tolist()) == expected[128_000:128_128]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["{}/a.txt", "{}/no.txt"], r"data\.files=.*/no\.txt: names no file"),
        ("{}/**/*.rst", r"data\.files=.*/\*\.rst: names no file"),
        (["{}/a.txt", "{}/deeper"], r"data\.files=.*/deeper: names no file.* those of a folder"),
        ("{}/dangling*", r"data\.files=.*/dangling\.txt: cannot be read \(No such file"),
        ("{}/empty", r"data\.files=.*/empty: 0 bytes"),
        ("{}/short", r"data\.files=.*/short: 17 bytes.*leaves 16 for the train split.*needs 17"),
    ],
)
def test_mistakes_in_files(corpus, files, problem):
    folder = corpus[0]
    (folder / "dangling.txt").symlink_to(folder / "gone")
    (folder / "empty").touch()
    (folder / "short").write_bytes(b"x" * 17)
    files = files.format(folder) if isinstance(files, str) else [entry.format(folder) for entry in files]
    with pytest.raises(UserError, match=problem):
        Text("train", files=files, context_length=16)
