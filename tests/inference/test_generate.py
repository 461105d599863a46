"""`mode=generate`: the same text for the same seed and prompts, whatever the batches; with a cache or without."""

import json

import pytest
import runs
import torch
from helpers import ROOT, lines, run_cli
from markdown import commands

from trainapp.config.schema import Generate
from trainapp.errors import TrainingStopped, UserError
from trainapp.inference import decoding
from trainapp.inference.decoding import continue_by_position, sample_token
from trainapp.inference.generate import printable
from trainapp.models.gpt import GPT

QUIET = ("train.device=cpu", "memory.guard=false", "tracker=[]")
PROMPTS = ["import ", "def f(self, x", "x", "return ", "class A"]
GPT_TEXT = (
    "model=gpt",
    "model.depth=2",
    "model.width=32",
    "model.heads=2",
    "data=text",
    "data.context_length=64",
    "model.context_length=64",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on text of this repository's own, long enough for letters to follow each other."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("import os\nimport sys\ndef f(self, x):\n    return x + 1\nclass A:\n    pass\n" * 100)
    settings = (f"data.files={text}", "optimizer.lr=0.01", "train.max_steps=60")
    runs.run(folder, *GPT_TEXT, *settings)
    return folder


def generate(tmp_path, trained, *overrides, prompts=PROMPTS, output="g.jsonl"):
    given = (f"generate.prompts={json.dumps(prompts)}", "generate.max_new_tokens=24")
    return runs.infer("generate", tmp_path, trained, *given, *overrides, output=output)


@pytest.mark.slow
def test_the_command_line(tmp_path, trained):
    """Without a word about model and data. The text is printed, and in the run directory."""
    command = [word.replace("RUN", str(trained)) for word in commands(ROOT / "docs/inference.md")[2][3:]]
    done = run_cli(*command, "generate.max_new_tokens=32", "hydra.run.dir=out", *QUIET, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = lines(tmp_path / "out/generations.jsonl")
    assert (line["index"], line["prompt"], line["ended"]) == (0, "import ", "max_new_tokens")
    assert len(line["tokens"]) == 32
    assert bytes(line["tokens"]).decode(errors="replace") == line["text"]
    assert printable(f"import {line['text']}") in done.stdout


@pytest.mark.slow
def test_the_same_texts_whatever_the_batches(tmp_path, trained):
    """And others with another seed, for prompts of several lengths; equal prompts have texts of their own."""
    prompts = [*PROMPTS, "x"]
    one = generate(tmp_path, trained, "generate.batch_size=1", prompts=prompts)
    assert [line["prompt"] for line in one] == prompts
    assert generate(tmp_path, trained, "generate.batch_size=4", prompts=prompts) == one
    other = generate(tmp_path, trained, "generate.seed=1", prompts=prompts)
    assert all(a["text"] != b["text"] for a, b in zip(one, other, strict=True))
    assert one[2]["text"] != one[5]["text"]


def test_temperature_zero_is_the_likeliest_token_of_plain_pytorch(tmp_path, trained):
    found = generate(tmp_path, trained, "generate.temperature=0", prompts=PROMPTS[:2])
    run = runs.prepare(tmp_path / "plain", "mode=eval", f"checkpointing.resume={trained}")
    run.tracker.close()
    for line in found:
        tokens = list(line["prompt"].encode())
        for _ in range(24):
            with torch.no_grad():
                tokens.append(int(run.state.model.eval()(torch.tensor([tokens]))[0, -1].argmax()))
        assert line["tokens"] == tokens[-24:]
    assert found[0]["text"] != found[1]["text"]


def test_the_end_of_a_text(tmp_path, trained):
    """Here a line break, which other lines do not wait for."""
    free = generate(tmp_path, trained, "generate.temperature=0.5")
    ended = generate(tmp_path, trained, "generate.temperature=0.5", "generate.end_of_text=10")
    assert {line["ended"] for line in ended} >= {"end_of_text"}
    for line, whole in zip(ended, free, strict=True):
        assert whole["text"].partition("\n")[0] == line["text"]
        assert (line["tokens"][-1] == 10) == (line["ended"] == "end_of_text")


@pytest.mark.slow
def test_memory_runs_out(tmp_path, trained, monkeypatch):
    """In the middle of a text: the batch is halved, and the texts are the same."""
    whole = generate(tmp_path, trained)
    build, sizes = decoding.build_decoder, []

    def failing(model, length, output):
        decode = build(model, length, output)

        def fails(tokens):
            sizes.append(len(tokens))
            if len(tokens) > 2 and len(sizes) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)")
            return decode(tokens)

        return fails

    monkeypatch.setattr(decoding, "build_decoder", failing)
    assert generate(tmp_path, trained, "generate.batch_size=5") == whole
    assert (sizes[0], sizes[11]) == (5, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("generate.max_new_tokens=55",),
            r"generate.prompts\[1\] has 13 tokens, and the model reads 64; use at most 52",
        ),
        (("generate.prompts=[]",), "there is nothing to continue"),
        (("generate.prompts=[[1, 300]]",), "token 300 is not one of the vocabulary's 256"),
    ],
)
def test_one_message(tmp_path, trained, overrides, message):
    with pytest.raises(UserError, match=message):
        generate(tmp_path, trained, *overrides)


@pytest.mark.slow
def test_tokens_where_the_data_has_no_text(tmp_path):
    runs.run(tmp_path / "run", *runs.MODELS["gpt"])
    with pytest.raises(UserError, match="the data has no text"):
        generate(tmp_path, tmp_path / "run", "generate.max_new_tokens=4")
    (line,) = generate(tmp_path, tmp_path / "run", "generate.max_new_tokens=4", prompts=[[1, 2, 3]])
    assert "text" not in line
    assert len(line["tokens"]) == 4


# Its parts


def test_a_terminal_gets_no_control_characters():
    assert printable("a\x1b[2J\tä\nb\r\x07") == "a\ufffd[2J\tä\nb\ufffd\ufffd"


def test_with_and_without_a_cache():
    torch.manual_seed(0)
    model = GPT(vocab_size=40, context_length=24, depth=2, width=32, heads=4).eval()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]

    def texts(model, chosen):
        own = {number: prompts[number] for number in chosen}
        with torch.inference_mode():
            return continue_by_position(model, own, Generate(max_new_tokens=10), frozenset(), torch.device("cpu"))

    class WithoutCache(torch.nn.Module):
        def forward(self, tokens):
            return model(tokens)

    whole = texts(model, [0, 1, 2])
    assert whole == texts(WithoutCache(), [0, 1, 2])
    assert whole == [texts(model, [number])[0] for number in range(3)]
    assert all(len(text) == 10 for text in whole)


def test_draws_follow_the_distribution():
    """Frequencies of many draws, and which tokens are left out."""
    logits, generator = torch.tensor([1.0, 3.0, 2.0, -torch.inf, 0.0]), torch.Generator().manual_seed(0)

    def frequencies(**settings):
        tokens = torch.tensor([sample_token(logits, generator, Generate(**settings)) for _ in range(4000)])
        return (torch.bincount(tokens, minlength=5) / 4000).tolist()

    def expected(*kept, temperature=1.0):
        masked = torch.full((5,), -torch.inf).index_copy(0, torch.tensor(kept), logits[list(kept)])
        return pytest.approx(torch.softmax(masked / temperature, -1).tolist(), abs=0.03)

    assert frequencies() == expected(0, 1, 2, 4)
    assert frequencies(temperature=2.0) == expected(0, 1, 2, 4, temperature=2.0)
    assert frequencies(top_k=2) == expected(1, 2)
    assert frequencies(top_k=100) == expected(0, 1, 2, 4)
    assert frequencies(top_p=0.1) == expected(1)
    assert frequencies(top_p=0.8) == expected(1, 2)
    assert frequencies(temperature=0.0) == [0, 1, 0, 0, 0]
    assert frequencies(temperature=2.0) != expected(0, 1, 2, 4)
    with pytest.raises(TrainingStopped, match="nan"):
        sample_token(logits * torch.nan, generator, Generate())
