"""Sampled: what a verify step gives each request, from the arrays of the step to what is committed.

Knows the columns of the step's outputs. Changes no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphengine.frame import Frame
from graphengine.sampling.logprobs import Logprob, read_logprobs
from graphengine.scheduler import ScheduledDecode
from proposers.base import Draft
from proposers.device_draft import DeviceDraft


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a verify step emits for one request, stops applied."""

    decode: ScheduledDecode
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted: int  # of `token_ids`, how many were drafts
    logprobs: Sequence[Mapping[int, Logprob]] = ()  # one for each token, where asked for
    draft_kv_len: int | None = None  # see `commit`

    def cut(self, count: int) -> Sampled:
        """The first `count` tokens of it, as if nothing came after them."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            num_accepted=min(self.num_accepted, count),
            logprobs=self.logprobs[:count],
        )


def read_sampled(
    decodes: Sequence[ScheduledDecode],
    draft: Draft,
    frame: Frame,
) -> list[Sampled]:
    """Wait for what a step has verified, and read it.

    Args:
        decodes: `[num_reqs]`, in the order of the batch.
        draft: what was verified, in that order.
        frame: of the step.
    """
    packed = frame.packed().tolist()
    lengths = draft.num_draft_tokens.tolist()
    cached = _draft_kv_lens(decodes, draft)
    sampled = [
        Sampled(decode, row[2 : 2 + row[0]], length, row[1], draft_kv_len=rows)
        for decode, length, rows, row in zip(decodes, lengths, cached, packed, strict=True)
    ]
    wanted = [decode.request.params.logprobs for decode in decodes]
    if all(number is None for number in wanted):
        return sampled
    ids, values, ranks = frame.logprobs()
    return [
        item
        if number is None
        else replace(
            item,
            logprobs=[
                read_logprobs(ids[index, row], values[index, row], ranks[index, row], number)
                for row in range(len(item.token_ids))
            ],
        )
        for index, (item, number) in enumerate(zip(sampled, wanted, strict=True))
    ]


def _draft_kv_lens(decodes: Sequence[ScheduledDecode], draft: Draft) -> Sequence[int | None]:
    """Leading slots of each request that hold draft KV now; see `commit`."""
    if isinstance(draft, DeviceDraft):
        requests = [decode.request for decode in decodes]
        pairs = zip(requests, draft.ahead.tolist(), strict=True)
        return [max(one.draft_kv_len, one.num_tokens + ahead) for one, ahead in pairs]
    if draft.draft_kv_lens is None:
        return [None] * len(decodes)
    found: list[int | None] = draft.draft_kv_lens.tolist()
    return found
