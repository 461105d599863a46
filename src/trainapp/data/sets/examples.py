"""Examples for fine-tuning, from JSON lines to tokens of which those of the answers are marked."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainapp.errors import UserError

ANSWER = 1 << 30  # in a stored token: it is one of an answer
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Example(NamedTuple):
    """What names an example in a message, and its content."""

    place: str
    row: dict[str, Any]


def read_examples(paths: Sequence[str]) -> Iterator[Example]:
    """Of .jsonl files one per line, of .json files the items of a list. Raises UserError for what is neither."""
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                if path.endswith(".json"):
                    yield from _listed(path, file.read())
                    continue
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _checked(f"{path}:{number}", _parsed(f"{path}:{number}", line))
        except UnicodeDecodeError as error:
            raise UserError(f"data.files={path}: not text in UTF-8 ({error})") from None


def _listed(path: str, text: str) -> Iterator[Example]:
    rows = _parsed(path, text)
    if not isinstance(rows, list):
        raise UserError(f"data.files={path}: must hold a list of examples, or be JSON lines in a .jsonl file")
    for number, row in enumerate(rows, start=1):
        yield _checked(f"{path}, example {number}", row)


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"data.files: {place}: not JSON ({error})") from None


def _checked(place: str, row: Any) -> Example:
    if not isinstance(row, dict):
        raise UserError(f'data.files: {place}: an example must be an object, such as {{"prompt": "a", "answer": "b"}}')
    return Example(place, row)


def tokenized(examples: Iterator[Example], tokenizer: Any, keys: tuple[str, str, str]) -> Iterator[np.ndarray]:
    """int32 [n] of each example, where `ANSWER` is set in the tokens of its answers.

    keys: under which an example has its prompt and its answer, or its messages. Raises UserError for one that has
    neither, or that the tokenizer's chat template refuses.
    """
    prompt, answer, messages = keys
    for place, row in examples:
        if messages in row:
            yield _conversation(place, row[messages], tokenizer)
        elif isinstance(row.get(prompt), str) and isinstance(row.get(answer), str):
            yield _pair(row[prompt], row[answer], tokenizer)
        else:
            raise UserError(
                f"data.files: {place}: an example needs texts under {prompt!r} and {answer!r} (data.prompt, "
                f"data.answer), or a list under {messages!r} (data.messages); this one has "
                f"{', '.join(map(repr, row)) or 'nothing'}"
            )


def _pair(prompt: str, answer: str, tokenizer: Any) -> np.ndarray:
    """The prompt with what begins a text for this model, then the answer and the end of the text. Tokenised apart, so
    that no token holds some of both: when the model is used, the prompt is all that there is.
    """
    given, end = prompt_tokens(prompt, tokenizer), tokenizer.eos_token_id
    own = list(tokenizer(answer, add_special_tokens=False)["input_ids"]) + ([] if end is None else [end])
    return _marked(given + own, [False] * len(given) + [True] * len(own))


def prompt_tokens(prompt: str, tokenizer: Any) -> list[int]:
    """What comes before an answer: the prompt, with what begins a text for this model."""
    given = list(tokenizer(prompt, add_special_tokens=True)["input_ids"])
    ends = bool(given) and given[-1] == tokenizer.eos_token_id  # it goes after the answer
    return given[:-1] if ends else given


def message_tokens(text: str, tokenizer: Any) -> list[int]:
    """What comes before an answer to this message of a user, by the chat template."""
    written = _templated("a prompt", [{"role": "user", "content": text}], tokenizer, True)
    return list(tokenizer(written, add_special_tokens=False)["input_ids"])


def _conversation(place: str, turns: Any, tokenizer: Any) -> np.ndarray:
    """All messages as the chat template writes them; what it adds for an assistant's message is an answer."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise UserError(f"data.files: {place}: messages must be a list of objects with a role and a content")
    for number, turn in enumerate(turns, start=1):
        # A call of a tool has no text of its own, and templates that know such calls expect that.
        if turn.get("content") is None and not turn.get("tool_calls"):
            raise UserError(
                f"data.files: {place}: message {number} (of {turn['role']}) has no content, which would count "
                'as an empty text; give it one ("" for none), or leave the example out'
            )
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError(
            f"data.files: {place}: the tokenizer has no chat template, which turns messages into text; name a file "
            "with one by data.chat_template, or give prompts and answers"
        )
    if tokenizer.is_fast and MARKS_ANSWERS.search(str(template)):
        return _marked_by_template(place, turns, tokenizer)
    whole = _templated(place, turns, tokenizer, False)
    answers = []
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _templated(place, turns[:number], tokenizer, True) if number else ""
        after = _templated(place, turns[: number + 1], tokenizer, False)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise UserError(
                f"data.files: {place}: the chat template writes message {number + 1} differently once others follow, "
                "so that its answer cannot be told apart; use a template without that (data.chat_template)"
            )
        answers.append((len(before), len(after)))
    return _with_spans(whole, answers, tokenizer)


def _templated(place: str, turns: list[dict[str, Any]], tokenizer: Any, prompts: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompts))
    except Exception as error:  # whatever a template raises, such as on roles that do not alternate
        raise UserError(f"data.files: {place}: the chat template refuses the messages: {error}") from None


def _marked_by_template(place: str, turns: list[dict[str, Any]], tokenizer: Any) -> np.ndarray:
    """By a template that says itself what the assistant writes: `{% generation %}`."""
    try:
        coded = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:
        raise UserError(f"data.files: {place}: the chat template refuses the messages: {error}") from None
    return _marked(list(coded["input_ids"]), [bool(own) for own in coded["assistant_masks"]])


def _with_spans(text: str, answers: list[tuple[int, int]], tokenizer: Any) -> np.ndarray:
    """The text's tokens; marked are those that lie within one of these ranges of characters."""
    if tokenizer.is_fast:
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = list(coded["input_ids"]), coded["offset_mapping"]
        return _marked(ids, [any(a <= start and end <= b for a, b in answers) for start, end in places])
    ids, is_answer, done = [], [], 0
    for a, b in [*answers, (len(text), len(text))]:  # piece by piece: such a tokenizer knows no places
        for piece, marked in ((text[done:a], False), (text[a:b], True)):
            tokens = list(tokenizer(piece, add_special_tokens=False)["input_ids"]) if piece else []
            ids += tokens
            is_answer += [marked] * len(tokens)
        done = b
    return _marked(ids, is_answer)


def _marked(ids: list[int], is_answer: list[bool]) -> np.ndarray:
    return np.asarray(ids, np.int32) | np.where(is_answer, ANSWER, 0).astype(np.int32)
