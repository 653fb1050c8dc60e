"""Page data: a recording as the JSON that the page is drawn from, and the figures on it.

Owns the definitions of the figures and the form of the data, which `page.js` reads. Columns rather
than objects: an answer of thousands of tokens stays small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from graphengine.inspector.recorder import Answer, Recorder, Step, Visit
from graphengine.inspector.texts import TokenTexts

SMALLEST: Final = 5e-4  # alternatives less likely than this are left out
MAX_PROMPT_CHARS: Final = 4000  # of the prompt that are shown

Copies = Callable[[Visit], bool]


def page_data(recorder: Recorder, texts: TokenTexts, copies: Copies) -> dict[str, Any]:
    """All that has been recorded.

    Args:
        texts: of the engine's tokenizer.
        copies: whether a visit's drafts are copied text, not a model's.
    """
    answers = [_answer(one, recorder, texts, copies) for one in recorder.answers()]
    return {
        "answers": answers,
        # batch, k, tier, answers in it; milliseconds of draft, verify, prompts and host
        "steps": [
            [one.batch, one.num_drafts, one.tier, one.num_reqs, *_milliseconds(one)]
            for one in recorder.steps
        ],
        "prefill_ms": _rounded(1e3 * recorder.prefill_seconds),
        "vocab": dict(sorted(texts.known.items())),  # by id, complete only now
    }


def origins(visit: Visit) -> str:
    """One letter a token: accepted, recovered, bonus (behind drafts that were all right), plain."""
    letters = "a" * visit.num_accepted
    if len(visit.token_ids) > visit.num_accepted:
        if not visit.draft_ids:
            return letters + "p"
        letters += "b" if visit.num_accepted == len(visit.draft_ids) else "r"
    return letters


def figures(visits: Sequence[Visit], steps: Sequence[Step]) -> dict[str, Any]:
    """Counts of an answer, as `RequestMetrics` and `EngineStats` define them.

    `positions`: by place in the draft, how many drafts stood there and how many were accepted.
    `rate`: tokens a second from the end of the answer's first step on, which leaves its prompt out;
    None where that is no time.
    """
    longest = max((len(visit.draft_ids) for visit in visits), default=0)
    ends = [steps[visit.step].end for visit in visits]
    seconds = ends[-1] - ends[0] if ends else 0.0
    later = sum(len(visit.token_ids) for visit in visits[1:])
    return {
        "tokens": sum(len(visit.token_ids) for visit in visits),
        "steps": len(visits),
        "drafted": sum(len(visit.draft_ids) for visit in visits),
        "accepted": sum(visit.num_accepted for visit in visits),
        "positions": [
            [
                sum(len(visit.draft_ids) > place for visit in visits),
                sum(visit.num_accepted > place for visit in visits),
            ]
            for place in range(longest)
        ],
        "rate": _rounded(later / seconds) if seconds > 0 else None,
    }


def _answer(
    answer: Answer, recorder: Recorder, texts: TokenTexts, copies: Copies
) -> dict[str, Any]:
    request, visits = answer.request, answer.visits
    token_ids = [token for visit in visits for token in visit.token_ids]
    in_place = texts.in_place(token_ids)
    for token_id in [*token_ids, *(one for visit in visits for one in visit.draft_ids)]:
        texts.of(token_id)
    prompt = texts.whole(request.prompt_token_ids)
    metrics = request.metrics
    waited = None
    if metrics.first_token_time is not None and metrics.arrival_time is not None:
        waited = _rounded(metrics.first_token_time - metrics.arrival_time)
    return {
        "name": request.request_id,
        "prompt": prompt[-MAX_PROMPT_CHARS:],
        "prompt_cut": len(prompt) > MAX_PROMPT_CHARS,
        "prompt_tokens": request.num_prompt_tokens,
        "finish": request.finish_reason,
        "temperature": request.params.temperature,
        "first_token_s": waited,
        "figures": figures(visits, recorder.steps),
        "ids": token_ids,
        "origins": "".join(map(origins, visits)),
        # where it is not what the token is on its own
        "texts": {
            index: text
            for index, (token_id, text) in enumerate(zip(token_ids, in_place, strict=True))
            if text != texts.of(token_id)
        },
        # one of each token: probability and rank, then id and probability of the likeliest
        "likely": _likely(visits, texts) if request.params.logprobs is not None else None,
        # step, first token, tokens, accepted, drafts, whether copied, tokens matched, probabilities
        "visits": [
            [
                visit.step,
                visit.start,
                len(visit.token_ids),
                visit.num_accepted,
                visit.draft_ids,
                int(copies(visit)),
                visit.match_length,
                None if visit.draft_probs is None else list(map(_rounded, visit.draft_probs)),
            ]
            for visit in visits
        ],
    }


def _likely(visits: Sequence[Visit], texts: TokenTexts) -> list[list[float]]:
    found = []
    for visit in visits:
        for token_id, logprobs in zip(visit.token_ids, visit.logprobs, strict=True):
            own = logprobs[token_id]
            row: list[float] = [_rounded(math.exp(own.logprob)), own.rank]
            others = sorted(logprobs.items(), key=lambda one: -one[1].logprob)
            for other, one in others:
                chance = math.exp(one.logprob)
                if chance >= SMALLEST:
                    texts.of(other)
                    row += [other, _rounded(chance)]
            found.append(row)
    return found


def _milliseconds(step: Step) -> list[float]:
    seconds = (step.draft, step.verify, step.prefill, step.host)
    return [round(1e3 * one, 3) for one in seconds]


def _rounded(number: float) -> float:
    """Four digits: nobody reads more, and each costs a byte."""
    return float(f"{number:.4g}")
