"""The peer process: its protocol, its errors, and rounds against a tiny engine."""

import os
import signal
from pathlib import Path

import pytest

from graphengine.bench.peer import Peer, run_rounds
from graphengine.engine import Engine


def test_unknown_peers_are_refused(checkpoint: Path) -> None:
    """Guards against a traceback, or a silent comparison with nothing."""
    with (
        pytest.raises(ValueError, match="allowed are transformers"),
        Peer.start("vllm", str(checkpoint), dtype="float32", num_threads=1),
    ):
        pass


def test_a_missing_library_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a hang or a broken pipe where the peer cannot import what it needs."""
    (tmp_path / "transformers.py").write_text("raise ImportError('there is no transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        pytest.raises(ValueError, match=r"there is no transformers; install transformers"),
        Peer.start("transformers", str(checkpoint), dtype="float32", num_threads=1),
    ):
        pass


def test_a_peer_that_dies_is_named(checkpoint: Path) -> None:
    """Guards against a broken pipe, which at the command line means that nobody reads on."""
    with Peer.start("transformers", str(checkpoint), dtype="float32", num_threads=1) as peer:
        os.kill(peer.description["pid"], signal.SIGKILL)
        for _ in range(2):  # the first request may still go into the pipe
            with pytest.raises(ValueError, match=r"the peer process ended \(exit -9\)"):
                peer.generate([[5, 6]], 2)


def test_rounds_compare_the_same_work(engine: Engine, checkpoint: Path) -> None:
    """Guards against sides that decode different prompts, lengths or (in fp32) other tokens."""
    batches = [[[5, 9, 200, 31, 77]], [[40, 41, 42], [7, 8, 9, 10, 11, 12]]]
    proposer = engine.proposer
    with Peer.start("transformers", str(checkpoint), dtype="float32", num_threads=1) as peer:
        found = run_rounds(engine, peer, batches, rounds=1, num_tokens=12)
    assert [(one.batch_size, one.round, one.num_tokens) for one in found] == [
        (1, 0, 12),
        (2, 0, 24),
    ]
    assert [one.num_agreeing for one in found] == [12, 24]
    assert all(one.ratio > 0 for one in found)
    assert engine.proposer is proposer
    assert engine.stats().num_draft_tokens == 0
