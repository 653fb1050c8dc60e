"""The loop: resumed as if never stopped, refused where it is another run, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from proposers.training import DraftConfig, DraftJob, TrainConfig, curves
from tests.proposers.training.conftest import Taught

Teach = Callable[[tuple[int, ...]], Taught]
QUICK = TrainConfig(
    steps=12, batch_tokens=96, measure_every=5, save_every=4, unroll=2, precision="float32"
)
EAGLE3 = DraftConfig(kind="eagle3", taps=(0, 1, 2), draft_vocab=60, dtype="float32")
KINDS = {
    "eagle3": EAGLE3,
    "eagle1": DraftConfig(kind="eagle1"),
    "mtp": DraftConfig(kind="mtp"),
    "draft_model": DraftConfig(kind="draft_model", layers=1, hidden=32),
}


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib: two thirds of the time; test_curves and test_train_draft draw."""
    monkeypatch.setattr(curves, "can_draw", lambda: False)


def make_job(
    taught: Taught, folder: Path, draft: DraftConfig = EAGLE3, training: TrainConfig = QUICK
) -> DraftJob:
    return DraftJob(
        target=taught.target,
        teacher=taught.teacher,
        pieces=taught.pieces,
        draft=draft,
        training=training,
        out=folder / "out",
        work=folder / "work",
        device=torch.device("cpu"),
    )


def stop_after(steps: int) -> Callable[[str, int, int, str], None]:
    """Progress that is interrupted."""

    def progress(phase: str, done: int, total: int, what: str) -> None:
        if phase == "training" and done == steps:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [3, 10])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, teach: Teach, kind: str, stop: int
) -> None:
    """Guards a checkpoint that forgets the optimiser, the order, the schedule or a measurement."""
    draft = KINDS[kind]
    taught = teach(draft.taps or ())
    whole = make_job(taught, tmp_path / "whole", draft).run()
    stopped = make_job(taught, tmp_path / "stopped", draft)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(stop_after(stop))
    assert not (stopped.out / "model.safetensors").exists()
    torch.rand(7)  # what else has drawn numbers must not matter
    resumed = stopped.run()
    assert resumed == whole
    first = load_file(tmp_path / "whole/out/model.safetensors")
    second = load_file(stopped.out / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_another_seed_is_another_run(tmp_path: Path, teach: Teach) -> None:
    """Guards a seed that decides nothing."""
    taught = teach((0, 1, 2))
    make_job(taught, tmp_path / "a").run()
    make_job(taught, tmp_path / "b", training=replace(QUICK, seed=1)).run()
    first, second = (load_file(tmp_path / side / "out/model.safetensors") for side in "ab")
    assert not torch.equal(first["fc.weight"], second["fc.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(tmp_path: Path, teach: Teach, kind: str) -> None:
    """Guards a loss that is about other rows than acceptance, or gradients that lead nowhere."""
    draft = KINDS[kind]
    training = replace(QUICK, steps=60, measure_every=30, learning_rate=5e-3, batch_tokens=512)
    points = make_job(teach(draft.taps or ()), tmp_path, draft, training).run()
    assert points[-1].held_out_loss < points[0].held_out_loss - 0.05
    assert points[-1].acceptance[0] > 0.03  # of a target that is random: chance is 0.004
    assert [point.step for point in points] == [30, 60]
    assert points[-1].tokens > points[0].tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        {"training": replace(QUICK, seed=1)},
        {"training": replace(QUICK, steps=13)},
        {"draft": replace(EAGLE3, draft_vocab=61)},
    ],
)
def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, teach: Teach, change: dict[str, Any]
) -> None:
    """Guards weights that are the result of no command."""
    taught = teach((0, 1, 2))
    job = make_job(taught, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        job.run(stop_after(5))
    with pytest.raises(ValueError, match="a run with another target, corpus or settings"):
        make_job(taught, tmp_path, **change).run()


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "another"])
def test_a_checkpoint_that_cannot_be_read_is_named(
    tmp_path: Path, teach: Teach, damage: str
) -> None:
    """Guards a traceback that does not say which file to delete."""
    job = make_job(teach((0, 1, 2)), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        job.run(stop_after(5))
    file = job.work / "eagle3.pt"
    if damage == "another":
        torch.save([torch.zeros(1)], file)
    else:
        whole = file.read_bytes()
        file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"text"}[damage])
    with pytest.raises(ValueError, match=r"eagle3\.pt is "):
        job.run()


def test_a_finished_run_is_only_exported_again(tmp_path: Path, teach: Teach) -> None:
    """Guards a second run over the first one's result."""
    job = make_job(teach((0, 1, 2)), tmp_path)
    points = job.run()
    (job.out / "model.safetensors").unlink()
    assert job.run(stop_after(1)) == points
    assert (job.out / "model.safetensors").exists()


def test_the_learning_rate_rises_and_falls() -> None:
    """Guards a jump at the start or a rate that never comes down."""
    config = TrainConfig(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] < 0.1
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_tokens", 0),
        ("unroll", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("decay", 1.5),
        ("clip", 0.0),
        ("warmup", 1.0),
        ("weight_decay", -0.1),
        ("precision", "float16"),
    ],
)
def test_settings_that_are_not_allowed(name: str, value: Any) -> None:
    """Guards a run that fails after the hidden states of an hour."""
    with pytest.raises(ValueError, match=f"{name}="):
        TrainConfig(**{name: value})
