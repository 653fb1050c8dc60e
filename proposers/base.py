"""The contract between a draft source and whoever verifies its drafts.

Owns the values that cross it (ProposeInputs, Draft, Commit) and its two protocols: Proposer, and
the Runtime that the engine hands to a proposer's constructor. Knows nothing of schedulers, KV
blocks, graphs or concrete proposers. Drafts can only cost time, never change a token: verification
decides, so a proposer may guess as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

INTERFACE: Final = "1"
"""Version of the contract, which is this file, `device.py` and `info.py`.

It is raised where a proposer that was written for it would break or be misled: something that it
calls, defines, makes or reads is gone, is asked for in another way or means something else. What is
merely added does not count. `tests/proposers/interface_1.txt` is the list that holds this down.
"""

NO_TOKEN = -1
"""Fills the unused tail of a row of draft token ids."""

SUM_TOLERANCE = 1e-4  # of probabilities, which are rounded to fp32

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]

DraftSampling = Literal["greedy", "coupled", "probabilistic"]
"""How a proposer that has a distribution chooses from it; see `drafting.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSampling:
    """How the tokens of a request are chosen, as far as drafting may look at it."""

    temperature: float  # 0: greedy
    seed: int  # in [0, 2**64)
    choice: int = 0  # which of the request's n answers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheRows:
    """Where the requests of a batch lie in the KV cache; for proposers with KV of their own."""

    # int32 [num_reqs, max_blocks]; 0, the null block, where nothing is allocated
    block_table: TokenArray
    # int32 [num_reqs]: leading slots whose draft KV is valid, as long as the drafts in them of a
    # step under way are accepted
    draft_kv_lens: TokenArray
    # int32 [num_reqs]: rows of the requests on the device; None only in inputs made by hand
    state_rows: TokenArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProposeInputs:
    """What a proposer may look at for one step. The engine writes it, a proposer only reads it.

    Rows are requests in batch order; the order, and who is in it, may change from step to step.
    Every history is verified: no draft that was rejected is ever in it.
    """

    # num_reqs entries, unique
    request_ids: Sequence[str]
    # num_reqs arrays, each int32 [num_tokens_i], num_tokens_i >= 1: prompt + output so far, a
    # read-only view
    token_ids: Sequence[TokenArray]
    # int32 [num_reqs]: how many drafts each row may have this step, 0..k
    num_draft_tokens: TokenArray
    # width of the draft that is to be returned
    k: int
    # num_reqs entries from the engine; none only in inputs made by hand, where all is greedy
    sampling: Sequence[RequestSampling] = ()
    # num_reqs entries, or none: all share. Whose cached prefixes a request shares (None: those of
    # all that have no salt); drafts may tell no more than these do.
    cache_salts: Sequence[str | None] = ()
    # None only in inputs made by hand
    cache: CacheRows | None = None
    # int32 [num_reqs]: how many tokens a step under way may bring beyond token_ids, of which it
    # brings at least one; None: none are. Only for proposers with `needs_tokens=False`
    num_in_flight: TokenArray | None = None
    # whether drafts without `probs` may stay where they are made (`device_draft.py`)
    on_device: bool = False

    def __post_init__(self) -> None:
        num_reqs = len(self.request_ids)
        assert len(self.token_ids) == num_reqs, (
            f"{num_reqs} request ids but {len(self.token_ids)} histories"
        )
        assert self.num_draft_tokens.shape == (num_reqs,), (
            f"num_draft_tokens has shape {self.num_draft_tokens.shape}, expected ({num_reqs},)"
        )
        assert len(self.sampling) in (0, num_reqs), (
            f"{num_reqs} requests but {len(self.sampling)} entries of sampling"
        )
        assert len(self.cache_salts) in (0, num_reqs), (
            f"{num_reqs} requests but {len(self.cache_salts)} cache salts"
        )

    @property
    def num_reqs(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """The guessed continuation of each row. A proposer writes it; engine and verifier read it."""

    # int32 [num_reqs, k], NO_TOKEN from num_draft_tokens[i] on
    token_ids: TokenArray
    # int32 [num_reqs]: drafts in each row, 0..the row's allowance
    num_draft_tokens: TokenArray
    # float32 [num_reqs, k, vocab], on the host: the distribution that each draft was drawn from,
    # these very numbers, summing to 1; None: drafts are deterministic
    probs: torch.Tensor | None = None
    # int32 [num_reqs]: leading slots whose draft KV is valid now, as long as the drafts in them are
    # accepted; None: no KV was touched
    draft_kv_lens: TokenArray | None = None
    # int32 [num_reqs]: tokens at the end of the history that the source of the row's drafts
    # matched, 0 for no match; None: the proposer does not match
    match_lengths: TokenArray | None = None

    @classmethod
    def empty(cls, num_reqs: int, k: int) -> Draft:
        """A draft of width k without a token in it."""
        return cls(
            token_ids=np.full((num_reqs, k), NO_TOKEN, dtype=np.int32),
            num_draft_tokens=np.zeros(num_reqs, dtype=np.int32),
        )

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int] | TokenArray],
        k: int,
        match_lengths: Sequence[int] | None = None,
    ) -> Draft:
        """A draft of width k from one sequence of at most k token ids for each request."""
        draft = cls.empty(len(rows), k)
        if match_lengths is not None:
            draft = replace(draft, match_lengths=np.array(match_lengths, dtype=np.int32))
        for index, row in enumerate(rows):
            assert len(row) <= k, f"row {index} has {len(row)} drafts, the width is {k}"
            draft.token_ids[index, : len(row)] = row
            draft.num_draft_tokens[index] = len(row)
        return draft

    def rows(self, indices: Sequence[int]) -> Draft:
        """The drafts of these requests alone."""
        chosen = list(indices)
        return Draft(
            token_ids=self.token_ids[chosen],
            num_draft_tokens=self.num_draft_tokens[chosen],
            probs=None if self.probs is None else self.probs[chosen],
            draft_kv_lens=None if self.draft_kv_lens is None else self.draft_kv_lens[chosen],
            match_lengths=None if self.match_lengths is None else self.match_lengths[chosen],
        )

    def validate(self, inputs: ProposeInputs, vocab_size: int) -> None:
        """Raise AssertionError, naming the row, where this does not answer inputs as promised."""
        num_reqs, k = inputs.num_reqs, inputs.k
        for field, array, expected in (
            ("token_ids", self.token_ids, (num_reqs, k)),
            ("num_draft_tokens", self.num_draft_tokens, (num_reqs,)),
            ("match_lengths", self.match_lengths, (num_reqs,)),
            ("draft_kv_lens", self.draft_kv_lens, (num_reqs,)),
        ):
            if array is not None and (array.shape != expected or array.dtype != np.int32):
                raise AssertionError(
                    f"draft {field} are {array.dtype} {array.shape}, expected int32 {expected}"
                )
        _fail_on_first_row(
            (self.num_draft_tokens < 0) | (self.num_draft_tokens > inputs.num_draft_tokens),
            lambda row: (
                f"{self.num_draft_tokens[row]} drafts, allowance {inputs.num_draft_tokens[row]}"
            ),
        )
        if self.match_lengths is not None:
            sizes = self.match_lengths
            histories = [len(tokens) for tokens in inputs.token_ids]
            _fail_on_first_row(
                (sizes < 0) | (sizes > np.array(histories, dtype=np.int32)),
                lambda row: f"{sizes[row]} tokens matched of a history of {histories[row]}",
            )
        if self.draft_kv_lens is not None:
            rows, known = self.draft_kv_lens, [len(tokens) + k for tokens in inputs.token_ids]
            before = inputs.cache.draft_kv_lens if inputs.cache is not None else np.zeros_like(rows)
            _fail_on_first_row(
                (rows < before) | (rows > np.array(known, dtype=np.int32)),
                lambda row: (
                    f"{rows[row]} rows of draft KV, of {known[row]} tokens and drafts; there were "
                    f"{before[row]}"
                ),
            )
        live = np.arange(k)[None, :] < self.num_draft_tokens[:, None]
        _fail_on_first_row(
            (live & ((self.token_ids < 0) | (self.token_ids >= vocab_size))).any(axis=1),
            lambda row: f"draft ids {self.token_ids[row].tolist()} outside [0, {vocab_size})",
        )
        if self.probs is not None:
            self._check_probs(self.probs, live, (num_reqs, k, vocab_size))
        _fail_on_first_row(
            (~live & (self.token_ids != NO_TOKEN)).any(axis=1),
            lambda row: (
                f"{self.token_ids[row].tolist()} is not {NO_TOKEN} after "
                f"{self.num_draft_tokens[row]} drafts"
            ),
        )

    def _check_probs(
        self, probs: torch.Tensor, live: npt.NDArray[np.bool_], expected: tuple[int, int, int]
    ) -> None:
        """Hold distributions to what they are of; live [num_reqs, k]: where there are drafts."""
        shape, kind = tuple(probs.shape), str(probs.dtype).removeprefix("torch.")
        if (shape, kind) != (expected, "float32"):
            raise AssertionError(f"draft probs are {kind} {shape}, expected float32 {expected}")
        ids = np.maximum(self.token_ids, 0)[:, :, None]
        numbers = probs.detach().numpy()
        drawn = np.take_along_axis(numbers, ids, axis=2)[:, :, 0]
        _fail_on_first_row(
            (live & ~(drawn > 0)).any(axis=1),
            lambda row: f"a draft has probability {drawn[row].tolist()} of being drawn",
        )
        sums = numbers.sum(axis=2, dtype=np.float64)
        least = numbers.min(axis=2)
        is_law = (np.abs(sums - 1) < SUM_TOLERANCE) & (least >= 0)
        _fail_on_first_row(
            (live & ~is_law).any(axis=1),
            lambda row: (
                f"probabilities that sum to {sums[row].tolist()}, the least of them "
                f"{least[row].tolist()}"
            ),
        )


class _Describe(Protocol):
    def __call__(self, row: int, /) -> str: ...


def _fail_on_first_row(bad: npt.NDArray[np.bool_] | np.bool_, describe: _Describe) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise AssertionError(f"draft row {row}: {describe(row)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a step added to each request, after stops. Written by the engine."""

    request_ids: Sequence[str]
    # num_reqs lists of newly verified token ids: accepted drafts, then the recovered or bonus token
    token_ids: Sequence[Sequence[int]]
    # how many of the drafts of each request were accepted
    num_accepted: Sequence[int]


class Runtime(Protocol):
    """What the engine tells a proposer about itself, once, at construction."""

    @property
    def vocab_size(self) -> int:
        """Target vocabulary; every draft id is in [0, vocab_size)."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest history in tokens, prompt and output together."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Most rows that one propose call can have."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Largest k that propose is called with."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the target model runs."""
        ...

    @property
    def draft_sampling(self) -> DraftSampling:
        """How a proposer that has a distribution is to choose from it."""
        ...

    def gumbels(
        self, request: RequestSampling, position: int, stream: Literal["target", "draft"]
    ) -> FloatArray:
        """Standard Gumbel numbers `[vocab_size]` of a place, always the same.

        Args:
            position: index of the token that they choose, prompt included.
            stream: `target`: those that will choose the target's token there; `draft`: others,
                which verification never looks at.
        """
        ...


@runtime_checkable
class Proposer(Protocol):
    """A source of drafts. Name and flags are constants, equal to those of its ProposerInfo."""

    @property
    def name(self) -> str:
        """The name it is registered under."""
        ...

    @property
    def graph_safe(self) -> bool:
        """Whether capture() can put it into graphs; if not, it runs beside the captured target."""
        ...

    @property
    def needs_hidden_states(self) -> bool:
        """Whether it reads the target's hidden states."""
        ...

    @property
    def produces_probs(self) -> bool:
        """Whether it has a distribution; its drafts carry it where they are drawn from it."""
        ...

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Guess up to inputs.num_draft_tokens[i] next tokens of row i, in a draft of width k."""
        ...

    def capture(self, manager: object) -> None:
        """Capture its graphs through manager. Raises RuntimeError where graph_safe is False."""
        ...

    def on_commit(self, commit: Commit) -> None:
        """Learn which tokens were verified, after each step. May be a no-op."""
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop all state of these requests; ids that are not known are ignored.

        They have ended, or are to start over: propose may come for one again, with its history.
        """
        ...


class StatelessProposer:
    """Base of proposers that keep nothing of a request between calls."""

    def on_commit(self, commit: Commit) -> None:
        """Nothing to follow: the verified history comes with every propose call."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept between calls."""


class HostProposer(StatelessProposer):
    """Base of proposers that run on the host: their flags, and what they have no need to do."""

    name: str
    graph_safe = False
    needs_hidden_states = False
    produces_probs = False

    def capture(self, manager: object) -> None:
        """Refuse: nothing of a host-side proposer can be captured."""
        raise RuntimeError(
            f"proposer {self.name!r} runs on the host (graph_safe=False) and cannot be captured; "
            "run it eagerly beside the captured target"
        )
