"""`data=sft`: the loss is on answers alone, padded or packed; no example sees another."""

import itertools
import json

import hf_files
import numpy as np
import pytest
import torch

from trainapp.data.sets.sft import IGNORED, SupervisedFineTuning, pack_documents
from trainapp.errors import UserError

pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
pytest.importorskip("datasets", reason="needs the extra trainapp[hf]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(hf_files.tokenizer_folder(tmp_path_factory.mktemp("tokenizer") / "own"))


@pytest.fixture
def make(tmp_path, tokenizer):
    """A data set of these rows, or of examples."""

    def data(rows=None, split="train", **arguments):
        file = tmp_path / "chat.jsonl"
        if rows is None:
            hf_files.examples(file)
        else:
            file.write_text("\n".join(map(json.dumps, rows)) + "\n")
        arguments = {"tokenizer": tokenizer, "context_length": 64, "val_fraction": 0.0, **arguments}
        return SupervisedFineTuning(split, str(file), **arguments)

    return data


def answers(data, index):
    """The text that the loss of a sequence is on, and all of its text."""
    sample = data[index]
    targets = sample["targets"]
    return data.tokenizer.decode(targets[targets != IGNORED]), data.tokenizer.decode(sample["inputs"])


def test_the_loss_is_on_the_answer_and_the_end_of_the_text(make):
    data = make([{"prompt": "the fox:", "answer": " the dog"}, {"prompt": "x", "answer": " the lazy dog"}])
    assert answers(data, 0) == (" the dog<|endoftext|>", "the fox: the dog")
    batch = data.__getitems__([0, 1])
    assert set(batch) == {"inputs", "targets"}
    for row, target in zip(batch["inputs"], batch["targets"], strict=True):
        counted = (target != IGNORED).nonzero().flatten()
        assert torch.equal(target[counted[:-1]], row[counted[1:]])  # shifted by one


def test_rows_of_both_kinds_are_read_once(make, monkeypatch, tmp_path, tokenizer):
    """In a table, a row has None for what the other kind has."""
    turns = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps", "name": "x"}]
    rows = [{"prompt": "the fox:", "answer": " the dog"}, {"messages": turns}]
    data = make(rows)
    assert [answers(data, index)[0] for index in range(2)] == [" the dog<|endoftext|>", "jumps<|endoftext|>"]
    monkeypatch.setattr(SupervisedFineTuning, "_example", None)  # would be called
    again = SupervisedFineTuning("train", str(tmp_path / "chat.jsonl"), tokenizer, context_length=64, val_fraction=0.0)
    assert torch.equal(again[0]["inputs"], data[0]["inputs"])


def test_of_a_conversation_the_assistants_messages_count(make):
    turns = [("user", "the fox"), ("assistant", "jumps"), ("user", "over"), ("assistant", "the dog")]
    data = make([{"messages": [{"role": role, "content": text} for role, text in turns]}])
    counted, text = answers(data, 0)
    assert counted == "jumps<|endoftext|>the dog<|endoftext|>"
    assert text == "<user>the fox<assistant>jumps<|endoftext|><user>over<assistant>the dog"


def test_a_template_may_mark_what_the_assistant_writes(make, tmp_path):
    """Then the text of a message may depend on those after it."""
    template = tmp_path / "template"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.last else 'short' }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [("user", "the fox"), ("assistant", "jumps"), ("user", "over"), ("assistant", "the dog")]
    data = make([{"messages": [{"role": role, "content": text} for role, text in turns]}], chat_template=str(template))
    assert answers(data, 0)[0] == "short<|endoftext|>the dog<|endoftext|>"


def test_a_prompt_is_written_as_the_examples_are(make):
    turns = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    chat, pairs = make([{"messages": turns}]), make([{"prompt": "the fox", "answer": "jumps"}])
    assert chat.tokenizer.decode(chat.encode("the dog")) == "<user>the dog<assistant>"
    assert chat.encode("the fox") == chat[0]["inputs"][: len(chat.encode("the fox"))].tolist()
    assert pairs.tokenizer.decode(pairs.encode("the dog")) == "the dog"


def test_packed_sequences_hold_the_same_targets_with_positions_of_their_own(make):
    plain, together = make(), make(pack=True)
    assert len(together) < len(plain) == 40
    batch = together.__getitems__(range(len(together)))
    assert batch["inputs"].shape == (len(together), 64) == batch["position_ids"].shape
    wanted = sorted(tuple(plain[i]["targets"][plain[i]["targets"] != IGNORED].tolist()) for i in range(40))
    found = []
    for targets, positions in zip(batch["targets"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), 64]
        pieces = [targets[a:b] for a, b in itertools.pairwise(starts)]
        found += [tuple(piece[piece != IGNORED].tolist()) for piece in pieces if (piece != IGNORED).any()]
        assert all(torch.equal(positions[a:b], torch.arange(b - a)) for a, b in itertools.pairwise(starts))
    assert sorted(found) == wanted


@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_document_within_its_room(seed):
    lengths = np.random.default_rng(seed).integers(2, 40, 200)
    sequences = pack_documents(np.minimum(lengths, 33) - 1, 32)
    assert sorted(index for sequence in sequences for index in sequence) == list(range(200))
    filled = [sum(min(lengths[index], 33) - 1 for index in sequence) for sequence in sequences]
    assert max(filled) <= 32
    assert len(sequences) <= 1.25 * sum(filled) / 32 + 1


def test_long_examples_are_cut_and_those_without_an_answer_left_out(make, caplog):
    rows = [{"prompt": "fox", "answer": " dog" * 90}, {"prompt": "fox " * 90, "answer": " dog"}]
    data = make([*rows, {"prompt": "a", "answer": "b"}])
    assert len(data) == 2
    assert "of 3 examples of the train split 1 are longer and cut, and 1 are left out" in caplog.text
    assert data[0]["inputs"].shape == (64,)
    with pytest.raises(UserError, match=r"data\.context_length=64: no example of the train split has an answer"):
        make(rows[1:])


def test_the_splits_share_the_examples(make):
    assert [len(make(split=split, val_fraction=0.25)) for split in ("train", "val")] == [30, 10]
    assert len(make(split="val")) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"data\.files=.*chat\.jsonl: cannot be read"),
        ('{"prompt": "a", "reply": "b"}', "needs texts under 'prompt' and 'answer'.*has 'prompt', 'reply'"),
        ('{"messages": "hello"}', r"data\.files: row 0: messages must be a list of objects"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
            r"row 0: messages must be a list of objects with a role and a content, .*drop the example",
        ),
    ],
)
def test_a_line_that_is_no_example(tmp_path, tokenizer, line, message):
    (tmp_path / "chat.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        SupervisedFineTuning("train", str(tmp_path / "chat.jsonl"), tokenizer)


def test_other_mistakes(make, tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"data\.files=no\.jsonl: cannot be read: Unable to find"):
        SupervisedFineTuning("train", "no.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"data\.tokenizer=null: name a folder"):
        make(tokenizer=None)
    with pytest.raises(UserError, match=r"data\.tokenizer=.*holds no tokenizer"):
        make(tokenizer=str(tmp_path))
    template = tmp_path / "template"
    template.write_text("{{ messages[-1].content }}")  # forgets what came before
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(UserError, match="the chat template writes message 2 differently once others follow"):
        make([{"messages": turns}], chat_template=str(template))


def test_a_call_of_a_tool_needs_no_text_of_its_own(make, tmp_path):
    template = tmp_path / "template"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}call {{ call.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "jumps"}]},
    ]
    counted, _ = answers(make([{"messages": turns}], chat_template=str(template)), 0)
    assert counted == "call jumps"
