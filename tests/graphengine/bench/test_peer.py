"""Peers: their places, their protocol, their errors, and rounds against a tiny engine."""

import json
import os
import signal
import stat
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from graphengine.bench.peers import process, report
from graphengine.bench.peers.models import peer_model
from graphengine.bench.peers.process import Peer, PeerPlace
from graphengine.bench.peers.rounds import OwnContender, run_rounds, serves
from graphengine.engine import Engine
from graphengine.models.locate import ModelLocation

TRANSFORMERS = PeerPlace("transformers")


def start(place: PeerPlace, checkpoint: Path, k: int = 0) -> AbstractContextManager[Peer]:
    return Peer.start(place, checkpoint, k=k, dtype="float32", threads=1, max_num_seqs=4)


@pytest.mark.parametrize("text", ["gpt-fast", "", "vllm=", "transformers=/no/such/python"])
def test_bad_places_are_refused(text: str) -> None:
    """Guards against a traceback, or a silent comparison with another engine than the one named."""
    with pytest.raises(ValueError, match=f"--against {text}: (allowed are transformers|there is)"):
        PeerPlace.parse(text)


def test_a_missing_library_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a hang or a broken pipe where the peer cannot import what it needs."""
    for library in ("transformers", "vllm"):
        (tmp_path / f"{library}.py").write_text(f"raise ImportError('there is no {library}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for library in ("transformers", "vllm"):
        with (
            pytest.raises(ValueError, match=f"there is no {library}; install {library}"),
            start(PeerPlace(library), checkpoint),
        ):
            pass


def test_llama_cpp_is_looked_for_where_it_was_said_to_be(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against another build than the one named, and a wait for a server that has died."""
    place, model = PeerPlace.parse(f"llama.cpp={tmp_path}"), tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=f"no llama-server in {tmp_path}"), start(place, model):
        pass
    with pytest.raises(ValueError, match=r"reads .gguf files alone"), start(place, checkpoint):
        pass
    server = tmp_path / "llama-server"
    server.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 3\n')
    server.chmod(server.stat().st_mode | stat.S_IEXEC)
    with pytest.raises(ValueError, match="ended with exit code 3"), start(place, model):
        pass


def test_models_in_the_form_that_a_peer_reads(tmp_path: Path) -> None:
    """Guards against other weights than ours, and a conversion where none is needed."""
    folder = ModelLocation(kind="hf", path=tmp_path)
    assert peer_model(TRANSFORMERS, folder, "float32") == tmp_path
    assert peer_model(PeerPlace("vllm"), folder, "float32") == tmp_path
    with pytest.raises(ValueError, match="it reads"):
        peer_model(PeerPlace("llama.cpp"), folder, "float32")
    file = tmp_path / "m.gguf"
    file.touch()
    place = PeerPlace("llama.cpp", tmp_path)
    with pytest.raises(ValueError, match="there is no llama-quantize"):
        peer_model(place, ModelLocation(kind="gguf", path=file), "float32")


def test_a_peer_that_dies_is_named(checkpoint: Path) -> None:
    """Guards against a broken pipe, which at the command line means that nobody reads on."""
    with start(TRANSFORMERS, checkpoint) as peer:
        os.kill(peer.description["pid"], signal.SIGKILL)
        for _ in range(2):  # the first request may still go into the pipe
            with pytest.raises(ValueError, match=r"the peer process ended \(exit -9\)"):
                peer.generate([[5, 6]], 2)


def test_every_script_stands_alone() -> None:
    """Guards against a peer that needs this project where only the peer is installed."""
    folder = Path(process.__file__).parent
    names = {path.name for path in folder.glob("peer_*.py")}
    assert names == {*process.SCRIPTS.values(), "peer_protocol.py"}
    for name in names:
        text = (folder / name).read_text()
        assert "import graphengine" not in text
        assert "from graphengine" not in text


def test_rounds_compare_the_same_work(engine: Engine, checkpoint: Path) -> None:
    """Guards against sides that decode different prompts, lengths or (in fp32) other tokens."""
    batches = {("a", 1): [[5, 9, 200, 31, 77]], ("a", 2): [[40, 41, 42], [7, 8, 9, 10, 11, 12]]}
    policy = engine.drafting.length.policy
    with start(TRANSFORMERS, checkpoint) as plain, start(TRANSFORMERS, checkpoint, 3) as drafts:
        contenders = [OwnContender(engine, 0), OwnContender(engine, 3), plain, drafts]
        assert [serves(one, 2) for one in contenders] == [True, True, True, False]
        turns = run_rounds(contenders, batches, rounds=2, num_tokens=12)
        assert all(one.peak_bytes > 0 and one.start_seconds > 0 for one in contenders)
        data = json.loads(json.dumps(report.as_json(contenders, turns)))
    assert len(turns) == 2 * (4 + 3)
    assert all(one.num_tokens == 12 * one.batch_size for one in turns)
    assert all(one.num_agreeing == one.num_tokens for one in turns)
    assert {one.num_as_plain for one in turns if one.k} == {1, 2}
    assert all(one.rate > 0 and one.first_token_seconds > 0 for one in turns)
    assert engine.drafting.length.policy is policy
    rows = {(row["batch_size"], row["contender"], row["k"]): row for row in data["peer_summary"]}
    assert len(rows) == 7
    assert rows[1, "graphengine", 3]["ratio"] is None
    assert rows[2, "transformers", 0]["ratio"]["num_values"] == 2
    assert rows[1, "transformers", 3]["agreement"] == 1.0
    assert len(data["turns"]) == len(turns)


def test_a_peer_in_a_python_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against a peer that runs in our environment whatever was asked for."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho used > {tmp_path}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with start(PeerPlace.parse(f"transformers={python}"), checkpoint) as peer:
        assert peer.description["version"]
    assert (tmp_path / "used").exists()
