"""`data=hf`: files, saved data sets, tokenizers and a BPE of its own."""

import hf_files
import pytest
import torch

from trainapp.data.sets.hf import open_dataset
from trainapp.data.sets.tokenized import load_tokenizer
from trainapp.errors import UserError

datasets = pytest.importorskip("datasets", reason="needs the extra trainapp[hf]")

ROWS = {
    "text": ["the quick brown fox", "jumps over", "the lazy dog"] * 20,
    "label": ["fox", "none", "dog"] * 20,
    "tags": [["fox"]] * 60,
}


def written(folder, kind):
    """ROWS as a path of this kind."""
    rows = datasets.Dataset.from_dict(ROWS)
    if kind == "saved":
        rows.save_to_disk(folder / "saved")
        return folder / "saved"
    if kind == "splits":
        datasets.DatasetDict(train=rows, validation=rows.select(range(6))).save_to_disk(folder / "splits")
        return folder / "splits"
    getattr(rows, f"to_{kind}")(folder / f"rows.{kind}")
    return folder / f"rows.{kind}"


@pytest.mark.parametrize("kind", ["parquet", "json", "csv", "saved", "splits"])
def test_blocks_are_the_joined_texts(tmp_path, kind):
    path = written(tmp_path, kind)
    data = open_dataset("train", str(path), vocab_size=280, context_length=8, val_fraction=0.1)
    assert data.task == "next_token"
    batch = data.__getitems__(range(len(data)))
    joined = torch.cat([batch["inputs"].flatten(), batch["targets"][-1, -1:]])
    kept = ROWS["text"] if kind == "splits" else ROWS["text"][:54]
    text = "".join(f"{row}<|endoftext|>" for row in kept)
    assert text.startswith(data.tokenizer.decode(joined))
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert data.spec == {"vocab_size": len(data.tokenizer), "context_length": 8}
    assert len(data.tokenizer) <= 280
    validation = open_dataset("val", str(path), vocab_size=280, context_length=8, val_fraction=0.1)
    assert len(validation) > 0
    assert validation.tokenizer.get_vocab() == data.tokenizer.get_vocab()


def test_blocks_go_on_from_a_thousand_texts_to_the_next(tmp_path):
    """`datasets` maps a thousand rows at a time, which may be less than a block."""
    datasets.Dataset.from_dict({"text": [f"{number}" for number in range(2500)]}).to_parquet(tmp_path / "rows.parquet")
    data = open_dataset("train", str(tmp_path / "rows.parquet"), vocab_size=257, context_length=4000, val_fraction=0.0)
    text = "".join(f"{number}<|endoftext|>" for number in range(2500))
    batch = data.__getitems__(range(len(data)))
    tokens = torch.cat([batch["inputs"].flatten(), batch["targets"][-1, -1:]])
    assert len(data) == (len(data.tokenizer(text)["input_ids"]) - 1) // 4000 == 2
    assert text.startswith(data.tokenizer.decode(tokens))


def test_the_second_run_tokenizes_nothing(tmp_path, monkeypatch):
    path = str(written(tmp_path, "parquet"))
    first = open_dataset("train", path, vocab_size=280, context_length=8)
    monkeypatch.setattr("trainapp.data.sets.hf._texts", None)  # would be called
    second = open_dataset("train", path, vocab_size=280, context_length=8)
    assert torch.equal(first.__getitems__([0, 3])["inputs"], second.__getitems__([0, 3])["inputs"])


def test_labels_become_classes_and_texts_are_padded_with_a_mask(tmp_path):
    tokenizer = str(hf_files.tokenizer_folder(tmp_path / "tokenizer"))
    data = open_dataset("train", str(written(tmp_path, "json")), label="label", tokenizer=tokenizer)
    assert data.task == "classification"
    assert data.spec["classes"] == ["dog", "fox", "none"]
    batch = data.__getitems__([0, 1, 2])
    assert batch["targets"].tolist() == [1, 2, 0]
    for row, mask, text in zip(batch["inputs"], batch["attention_mask"], ROWS["text"][:3], strict=True):
        assert data.tokenizer.decode(row[mask.bool()]) == text
        assert (row[~mask.bool()] == data.spec["pad_token_id"]).all()
    assert batch["attention_mask"].min() == 0
    data.save_tokenizer(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).pad_token_id == data.spec["pad_token_id"]


def test_classes_in_the_order_of_a_model(tmp_path):
    tokenizer, path = str(hf_files.tokenizer_folder(tmp_path / "tokenizer")), str(written(tmp_path, "json"))
    order = ["none", "fox", "dog", "cat"]
    data = open_dataset("train", path, label="label", tokenizer=tokenizer, classes=order)
    assert data.__getitems__([0, 1, 2])["targets"].tolist() == [1, 0, 2]
    assert data.spec["num_classes"] == 4
    with pytest.raises(
        UserError, match=r"data\.label=label: dog have no class: not among fox, none, which data\.classes"
    ):
        open_dataset("train", path, label="label", tokenizer=tokenizer, classes=["fox", "none"])


def test_long_texts_are_cut(tmp_path):
    tokenizer = str(hf_files.tokenizer_folder(tmp_path / "tokenizer"))
    data = open_dataset("train", str(written(tmp_path, "json")), label="label", tokenizer=tokenizer, context_length=2)
    assert data.__getitems__([0, 1])["inputs"].shape == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "body"}, r"data\.text=body: there is no such column; columns: text, label, tags"),
        ({"train_split": "all"}, r"data\.train_split=all: there is no such split; splits: train"),
        (
            {"context_length": 5000},
            r"data\.context_length=5000: the texts of the train split are shorter than",
        ),
        ({"path": "./none.parquet"}, r"data\.path=\./none\.parquet: cannot be read: Unable to find"),
        ({"path": None}, r"data\.path=null: name a data set"),
        ({"label": "tags"}, r"data\.label=tags: a text has one class"),
    ],
)
def test_a_mistake_gets_one_message(tmp_path, arguments, message):
    path = str(written(tmp_path, "parquet"))
    with pytest.raises(UserError, match=message):
        open_dataset("train", **{"path": path, "vocab_size": 280, **arguments})
