"""What the proposer tests share: a runtime, inputs, token streams, installed entry points."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from proposers import DraftSampling, ProposeInputs, RequestSampling

VOCAB_SIZE = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyRuntime:
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 128
    max_num_seqs: int = 16
    max_draft_tokens: int = 6
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    draft_sampling: DraftSampling = "greedy"

    def gumbels(
        self, request: RequestSampling, position: int, stream: str
    ) -> npt.NDArray[np.float64]:
        key = [request.seed, request.choice, position, stream == "draft"]
        found: npt.NDArray[np.float64] = np.random.default_rng(key).gumbel(size=self.vocab_size)
        return found


def make_inputs(
    histories: dict[str, Sequence[int]], *, k: int, allowances: Sequence[int] | None = None
) -> ProposeInputs:
    """Inputs over read-only histories; without allowances every row may have k drafts."""
    arrays = [np.array(tokens, dtype=np.int32) for tokens in histories.values()]
    for array in arrays:
        array.flags.writeable = False
    allowed = [k] * len(arrays) if allowances is None else allowances
    return ProposeInputs(
        request_ids=list(histories),
        token_ids=arrays,
        num_draft_tokens=np.array(allowed, dtype=np.int32),
        k=k,
    )


def make_stream(index: int, num_tokens: int = 100) -> list[int]:
    """A token stream with phrases that come back, so that look-ups do find something."""
    rng = np.random.default_rng(index)
    phrases = [rng.integers(0, VOCAB_SIZE, 5).tolist() for _ in range(4)]
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += phrases[rng.integers(4)] + rng.integers(0, VOCAB_SIZE, rng.integers(3)).tolist()
    return tokens[:num_tokens]


def install_entry_point(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, target: str
) -> None:
    """Put a distribution on sys.path that registers target under name, as a wheel would."""
    info = folder / f"thirdparty_{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: thirdparty-{name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[graphengine.proposers]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(folder))
