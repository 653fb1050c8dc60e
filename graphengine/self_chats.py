"""Chats that a model has with itself, or answers to questions: what drafts for it are trained on.

In a chat with itself the model is given its chat template up to the user's turn, and writes that
turn, too (Magpie, 2406.08464). So the text is what it would say, and nothing else is needed. Every
chat follows from its index, whatever is generated beside it. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphengine.llm import LLM
from graphengine.models.tokenizer import Tokenizer
from graphengine.sampling.params import SamplingParams

GROUP = 64  # chats that are generated and written together
MAX_USER_TOKENS = 96
# What engines for this are started with: room for a template, a turn and an answer.
MAX_MODEL_LEN, MAX_NUM_SEQS = 1024, 32
_SHORTEST_TURN = 8  # characters; what is shorter asks nothing
_MARK = "THE USER'S TURN"


@dataclass(frozen=True, slots=True)
class Answering:
    """How answers are drawn: most of them at temperature 0.7."""

    max_tokens: int
    greedy_every: int  # one in so many is greedy


TO_ITSELF = Answering(max_tokens=320, greedy_every=3)
TO_QUESTIONS = Answering(max_tokens=192, greedy_every=2)


def write_chats(
    llm: LLM, file: Path, count: int, progress: Callable[[int], None] | None = None
) -> None:
    """Append what is missing of the first `count` chats: lines of JSON, in order of their index.

    A turn that the model does not end, or that is nearly empty, makes no chat, so there are fewer
    lines. A line has `index`, `user`, `prompt_ids`, `output_ids` and the answer's finish `reason`.

    Args:
        llm: the model, with a chat template.
        file: made where it is missing; may hold chats of the same model already.
        count: indices to try.
        progress: called with how many have been tried.

    Raises:
        ValueError: the model has no chat template, or a line of the file is none of this.
    """
    before = user_prefix(_chat_tokenizer(llm))

    def chats(indices: range) -> list[str]:
        return _answers(llm, _turns(llm, before, indices), TO_ITSELF)

    _append(file, count, chats, progress)


def write_answers(
    llm: LLM, file: Path, questions: Sequence[str], progress: Callable[[int], None] | None = None
) -> None:
    """Append what is missing of the answers to questions: lines as of `write_chats`, in order.

    Args:
        llm: the model, with a chat template.
        file: made where it is missing; may hold answers already, of the same model.
        questions: a user's turn each.
        progress: called with how many have been answered.

    Raises:
        ValueError: the model has no chat template, or a line of the file is none of this, or is
            of another question.
    """
    _chat_tokenizer(llm)
    for number, (index, user) in enumerate(_stored(file), 1):
        if index < len(questions) and user != questions[index]:
            raise ValueError(
                f"answers {str(file)!r}, line {number}: it answers {user!r}, and question {index} "
                f"is {questions[index]!r}; delete the file, or give the questions that it is of"
            )

    def answers(indices: range) -> list[str]:
        return _answers(llm, {index: questions[index] for index in indices}, TO_QUESTIONS)

    _append(file, len(questions), answers, progress)


def _chat_tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ValueError("the model has no chat template, so it cannot chat")
    return llm.tokenizer


def _append(
    file: Path,
    count: int,
    lines_of: Callable[[range], list[str]],
    progress: Callable[[int], None] | None,
) -> None:
    """Write lines of the indices that the file lacks, a group at a time."""
    stored = _stored(file)
    start = stored[-1][0] + 1 if stored else 0
    with file.open("a", encoding="utf-8") as lines:
        while start < count:
            stop = min(start + GROUP, count)
            lines.writelines(lines_of(range(start, stop)))
            lines.flush()
            start = stop
            if progress is not None:
                progress(start)


def user_prefix(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template, up to where the user's turn starts.

    Raises:
        ValueError: the template does not show where that is.
    """
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, _ = tokenizer.decode(prompt, skip_special_tokens=False).partition(_MARK)
    if not mark:
        raise ValueError("the chat template does not hold the user's turn as it was written")
    return tokenizer.encode_plain(before)


def _turns(llm: LLM, before: list[int], indices: range) -> dict[int, str]:
    """What the model asks, by index, where it asks something."""
    asking = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=MAX_USER_TOKENS, seed=2 * index)
        for index in indices
    ]
    turns = llm.generate([before] * len(indices), asking)
    users = {
        index: turn.outputs[0].text.strip()
        for index, turn in zip(indices, turns, strict=True)
        if turn.outputs[0].finish_reason == "stop"
    }
    return {index: user for index, user in users.items() if len(user) >= _SHORTEST_TURN}


def _answers(llm: LLM, users: dict[int, str], how: Answering) -> list[str]:
    """A line each."""
    prompts = [llm.chat_prompt([{"role": "user", "content": user}]) for user in users.values()]
    answering = [
        SamplingParams(
            temperature=0.7 if index % how.greedy_every else 0.0,
            max_tokens=how.max_tokens,
            seed=2 * index + 1,
        )
        for index in users
    ]
    lines = []
    answers = llm.generate(prompts, answering)
    for (index, user), prompt, answer in zip(users.items(), prompts, answers, strict=True):
        output = answer.outputs[0]
        chat = {
            "index": index,
            "user": user,
            "prompt_ids": prompt,
            "output_ids": list(output.token_ids),
            "reason": output.finish_reason,
        }
        lines.append(json.dumps(chat) + "\n")
    return lines


def _stored(file: Path) -> list[tuple[int, str]]:
    """Index and user of each whole line; half a line, of a run that was killed, is cut off."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.write_bytes(whole)
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            chat = json.loads(line)
            found.append((int(chat["index"]), str(chat["user"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"chats {str(file)!r}, line {number}: expected a JSON object with index and user "
                f"({error})"
            ) from error
    return found
