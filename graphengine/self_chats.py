"""Chats that a model has with itself: what drafts for it are trained on.

The model is given its chat template up to the user's turn, and writes that turn itself; then it
answers (Magpie, 2406.08464). So the text is what it would say, and nothing else is needed. Every
chat follows from its index, whatever is generated beside it. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from graphengine.llm import LLM
from graphengine.models.tokenizer import Tokenizer
from graphengine.sampling.params import SamplingParams

GROUP = 64  # chats that are generated and written together
MAX_USER_TOKENS, MAX_ANSWER_TOKENS = 96, 320
# What engines for this are started with: room for a template, a turn and an answer.
MAX_MODEL_LEN, MAX_NUM_SEQS = 1024, 32
_SHORTEST_TURN = 8  # characters; what is shorter asks nothing
_MARK = "THE USER'S TURN"


def write_chats(
    llm: LLM, file: Path, count: int, progress: Callable[[int], None] | None = None
) -> None:
    """Append what is missing of the first `count` chats: lines of JSON, in order of their index.

    A turn that the model does not end, or that is nearly empty, makes no chat, so there are fewer
    lines. A line has `index`, `user`, `prompt_ids`, `output_ids` and the answer's finish `reason`.
    Every third answer is greedy, the others are drawn at temperature 0.7.

    Args:
        llm: the model, with a chat template.
        file: made where it is missing; may hold chats of the same model already.
        count: indices to try.
        progress: called with how many have been tried.

    Raises:
        ValueError: the model has no chat template, or a line of the file is none of this.
    """
    tokenizer = llm.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError("the model has no chat template, so it cannot chat with itself")
    before = user_prefix(tokenizer)
    start = _next_index(file)
    with file.open("a", encoding="utf-8") as lines:
        while start < count:
            stop = min(start + GROUP, count)
            lines.writelines(_chats(llm, before, range(start, stop)))
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


def _chats(llm: LLM, before: list[int], indices: range) -> list[str]:
    """A line each for the chats of these indices that there are."""
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
    users = {index: user for index, user in users.items() if len(user) >= _SHORTEST_TURN}
    prompts = [llm.chat_prompt([{"role": "user", "content": user}]) for user in users.values()]
    answering = [
        SamplingParams(
            temperature=0.7 if index % 3 else 0.0,
            max_tokens=MAX_ANSWER_TOKENS,
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


def _next_index(file: Path) -> int:
    """The index after the last whole line; half a line, of a run that was killed, is cut off."""
    if not file.exists():
        return 0
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.write_bytes(whole)
    if not whole:
        return 0
    last = whole.splitlines()[-1]
    try:
        return int(json.loads(last)["index"]) + 1
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"chats {str(file)!r}: the last line has no index ({error})") from error
