"""Planted violations of the capture contract: each must fail at capture, with a telling message.

A test of one violation runs the plain step around it, so that nothing but the plant can fail.
"""

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from capture.buffers import BufferSpec, StaticBuffers
from capture.checks import CaptureError, capture_guard
from capture.ops import PythonOp, set_recorder
from capture.tape import Tape
from tests.capture.helpers import (
    KEY,
    SPECS,
    WIDTH,
    Bench,
    Step,
    Views,
    host_view,
    make_bench,
)

Plant = Callable[[Views], Any]

SYNCS: dict[str, Plant] = {
    "item": lambda views: views["valid"][0].item(),
    "tolist": lambda views: views["valid"].tolist(),
    "numpy": lambda views: views["valid"].numpy(),
    "numpy force": lambda views: views["valid"].numpy(force=True),
    "cpu": lambda views: views["valid"].cpu(),
    "print": lambda views: print(views["x"]),
    "repr": lambda views: repr(views["x"]),
    "str": lambda views: str(views["x"]),
    "f-string": lambda views: f"{views['x']}",
    "f-string of a scalar": lambda views: f"{views['valid'][0]:d}",
    "bool": lambda views: bool(views["valid"][0]),
    "if": lambda views: 1 if views["valid"][0] else 2,
    "comparison": lambda views: 1 if views["valid"][0] > 0 else 2,
    "int": lambda views: int(views["valid"][0]),
    "float": lambda views: float(views["x"][0, 0]),
    "complex": lambda views: complex(views["x"][0, 0]),
    "list index": lambda views: [1, 2, 3][views["valid"][0]],
    "range": lambda views: range(views["valid"][0]),
    "slice": lambda views: views["x"][: views["valid"][0]],
    "tensor index": lambda views: views["x"][views["valid"][0]],
    "is_nonzero": lambda views: views["valid"][0].is_nonzero(),
    "asarray": lambda views: np.asarray(views["valid"]),
    "array": lambda views: np.array(views["valid"]),
    "numpy function": lambda views: np.add(views["valid"], 1),
    "equal": lambda views: torch.equal(views["x"], views["x"]),
    "dlpack": lambda views: np.from_dlpack(views["valid"]),
}

COMPUTE: dict[str, Plant] = {
    "function": lambda views: torch.relu(views["x"]),
    "operator": lambda views: views["x"] + 1,
    "matmul": lambda views: views["x"] @ views["x"].T,
    "in place": lambda views: views["x"].add_(1),
    "augmented": lambda views: views["x"].__iadd__(1),
    "out=": lambda views: torch.add(views["x"], 1, out=views["x"]),
    "copy_": lambda views: views["x"].copy_(views["x"]),
    "fill_": lambda views: views["valid"].fill_(1),
    "zero_": lambda views: views["valid"].zero_(),
    "assignment": lambda views: views["x"].__setitem__(0, 1.0),
    "slice assignment": lambda views: views["x"].__setitem__(slice(1), views["x"][1:2]),
    "dtype": lambda views: views["x"].to(torch.bfloat16),
    "clone": lambda views: views["x"].clone(),
    "contiguous copy": lambda views: views["x"].T.contiguous(),
    "cat": lambda views: torch.cat([views["x"], views["x"]]),
    "new tensor": lambda views: torch.zeros(3),
    "tensor literal": lambda views: torch.tensor([1]),
    "from_numpy": lambda views: torch.from_numpy(np.zeros(3)),
    "nonzero": lambda views: views["valid"].nonzero(),
    "in": lambda views: 1 in views["valid"],
    "resize": lambda views: views["x"].resize_(1),
    "module": lambda views: torch.nn.ReLU()(views["x"]),
    "inference mode": lambda views: torch.inference_mode()(torch.relu)(views["x"]),
}


def planted(step: Step, plant: Plant) -> Callable[[Views], None]:
    """The plain step with the violation between its ops."""

    def fn(views: Views) -> None:
        step.norm(views)
        plant(views)
        step.rest(views)

    return fn


@pytest.fixture
def bench() -> Bench:
    return make_bench()


def test_the_step_without_a_plant_passes(bench: Bench) -> None:
    """Guards the tests below against failing for some other reason."""
    bench.tape(planted(bench.step, lambda views: None))


@pytest.mark.parametrize("name", SYNCS)
def test_reading_a_tensor_back_is_refused(bench: Bench, name: str) -> None:
    """Guards against a value that is right at capture and stale at every replay."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about the refused conversion
        with pytest.raises(CaptureError, match=r"host sync in a captured|computes outside an op"):
            bench.tape(planted(bench.step, SYNCS[name]))
    assert printed.getvalue() == ""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("item", r"item\(\)"),
        ("tolist", r"tolist\(\)"),
        ("numpy", r"numpy\(\)"),
        ("print", "printing a tensor"),
        ("f-string", "printing a tensor"),
        ("if", "a Python branch on a tensor"),
        ("int", r"int\(tensor\)"),
        ("float", r"float\(tensor\)"),
        ("list index", "a tensor used as an index"),
        ("asarray", "numpy conversion"),
    ],
)
def test_the_message_says_which_sync(bench: Bench, name: str, what: str) -> None:
    with pytest.raises(CaptureError, match=f"{what}; keep the value on the device"):
        bench.tape(planted(bench.step, SYNCS[name]))


@pytest.mark.parametrize("name", COMPUTE)
def test_computing_outside_an_op_is_refused(bench: Bench, name: str) -> None:
    """Guards against work that capture does once and replay never."""
    with pytest.raises(CaptureError, match=r"computes outside an op in a captured step.*make it"):
        bench.tape(planted(bench.step, COMPUTE[name]))


def test_a_compiled_function_called_directly_is_refused(bench: Bench) -> None:
    """Guards against generated code, which writes memory without torch seeing it."""
    compiled = torch.compile(lambda x: x.mul_(2), backend="eager")
    compiled(torch.ones(6, WIDTH))
    with pytest.raises(CaptureError, match="computes outside an op"):
        bench.tape(planted(bench.step, lambda views: compiled(views["x"])))


def test_views_are_no_computation(bench: Bench) -> None:
    """Guards against a contract so strict that a step cannot name a part of a buffer."""

    def views_of(views: Views) -> None:
        x = views["x"]
        x.view(-1, 3, WIDTH)[:, 0].transpose(0, 1).unsqueeze(0).squeeze(0)
        x.split(2)
        x[None].expand(2, *x.shape)
        x.reshape(-1).narrow(0, 1, 2).unfold(0, 2, 1)
        x.view(torch.int32).chunk(2)
        list(x)
        assert len(x) == x.shape[0]
        assert x.is_contiguous()

    bench.tape(planted(bench.step, views_of))


def test_the_guard_ends_with_the_capture(bench: Bench) -> None:
    with pytest.raises(CaptureError):
        bench.tape(planted(bench.step, SYNCS["item"]))
    assert torch.ones(3).add(1).tolist() == [2, 2, 2]
    with capture_guard():
        pass
    assert torch.ones(1).item() == 1


def test_the_recorder_ends_with_a_failing_step(bench: Bench) -> None:
    """Guards against ops that never run again after one capture failed."""

    def fails(views: Views) -> None:
        bench.step.norm(views)
        raise RuntimeError("in the model")

    with pytest.raises(RuntimeError, match="in the model"):
        bench.tape(fails)
    set_recorder(None)
    x = torch.zeros(2)
    PythonOp("fill", lambda out: out.fill_(1.0))(x)
    assert x.tolist() == [1, 1]


def test_a_capture_inside_a_capture_is_refused(bench: Bench) -> None:
    """Guards against calls of one step in the tape of another."""
    other = make_bench()
    with pytest.raises(CaptureError, match="in a captured step"):
        bench.tape(planted(bench.step, lambda views: other.tape()))
    with pytest.raises(AssertionError, match="another recording is in progress"):
        bench.tape(planted(bench.step, lambda views: set_recorder(Tape())))
    bench.tape()


# Control flow over data: every one of these looks at a host mirror, which no guard can see.


def test_a_branch_on_a_mirrored_input_is_refused(bench: Bench) -> None:
    """Guards against a graph that froze the branch of the batch it was captured with."""
    valid = host_view(bench.buffers, "valid")

    def fn(views: Views) -> None:
        bench.step.norm(views)
        if valid[1]:
            bench.step.double(views["normed"])
        bench.step.rest(views)

    with pytest.raises(
        CaptureError, match=r"depends on data: call 1 is op linear_f32 .* and double for another"
    ):
        bench.tape(fn)


def test_a_branch_on_an_input_that_capture_does_not_vary_is_refused(bench: Bench) -> None:
    """Guards against a filler of inputs that leaves one of them alike in both batches."""
    mode = host_view(bench.buffers, "mode")
    for test in (lambda: mode[0] == 7, lambda: mode[0] > 100, lambda: mode[0] < 0):

        def fn(views: Views, test: Callable[[], bool] = test) -> None:
            bench.step(views)
            if test():
                bench.step.double(views["logits"])

        with pytest.raises(CaptureError, match=r"depends on data: \d calls for one batch, \d"):
            bench.tape(fn)


def test_a_branch_on_scratch_is_refused(bench: Bench) -> None:
    normed = host_view(bench.buffers, "normed")

    def fn(views: Views) -> None:
        bench.step(views)
        if not np.isnan(normed).any():
            bench.step.double(views["logits"])

    with pytest.raises(CaptureError, match="depends on data"):
        bench.tape(fn)


def test_a_loop_count_from_data_is_refused(bench: Bench) -> None:
    valid = host_view(bench.buffers, "valid")

    def fn(views: Views) -> None:
        bench.step(views)
        for _ in range(min(3, abs(int(valid.sum())))):
            bench.step.double(views["logits"])

    with pytest.raises(CaptureError, match=r"depends on data: 6 calls for one batch, 7 for anoth"):
        bench.tape(fn)


def test_an_argument_from_data_is_refused(bench: Bench) -> None:
    valid = host_view(bench.buffers, "valid")

    def fn(views: Views) -> None:
        step = bench.step
        rows = int(valid[1]) + 1
        step.rms_norm(views["normed"], views["x"], step.norm_weight, rows, WIDTH, step.eps)
        step.rest(views)

    with pytest.raises(CaptureError, match=r"call 0 hands rms_norm other .* as arguments \[3\]"):
        bench.tape(fn)


def test_another_storage_for_another_batch_is_refused(bench: Bench) -> None:
    """Guards against double buffering in the step's Python, which replay would not flip."""
    weights = [bench.step.weight, bench.step.weight.clone()]

    def fn(views: Views) -> None:
        bench.step.weight = weights[bench.step.calls % 2]
        bench.step(views)

    with pytest.raises(CaptureError, match=r"call 1 hands linear_f32 other .* as arguments \[2\]"):
        bench.tape(fn)


def test_another_op_of_the_same_name_is_refused(bench: Bench) -> None:
    """Guards against ops told apart by name alone."""
    valid = host_view(bench.buffers, "valid")
    ops = [PythonOp("scale", lambda x: x.mul_(2)), PythonOp("scale", lambda x: x.mul_(3))]

    def fn(views: Views) -> None:
        bench.step(views)
        ops[int(valid[1]) == 1](views["logits"])

    with pytest.raises(CaptureError, match="call 5 is op scale for one batch and scale for anothe"):
        bench.tape(fn)


def test_a_branch_on_its_own_history_is_refused(bench: Bench) -> None:
    def fn(views: Views) -> None:
        bench.step(views)
        if bench.step.calls == 1:
            bench.step.double(views["logits"])

    with pytest.raises(CaptureError, match="depends on data: 6 calls for one batch, 5"):
        bench.tape(fn)


def test_a_host_write_to_an_input_is_refused(bench: Bench) -> None:
    """Guards against preparation of inputs inside the step: replay would not do it."""
    valid = host_view(bench.buffers, "valid")

    def fn(views: Views) -> None:
        valid[:] = 3
        bench.step(views)

    with pytest.raises(CaptureError, match="wrote input valid from the host"):
        bench.tape(fn)


@pytest.mark.parametrize("argument", [1.5, "text", [1], np.int64(1)])
def test_an_argument_that_no_tape_can_hold_is_refused(bench: Bench, argument: Any) -> None:
    """Guards against floats cut to integers and lists that change after capture."""
    op = PythonOp("scale", lambda x, by: None)
    with pytest.raises(CaptureError, match=r"op scale, argument 1: a \w+ cannot be captured"):
        bench.tape(planted(bench.step, lambda views: op(views["x"], argument)))


def test_a_wrong_number_of_native_arguments_is_refused(bench: Bench) -> None:
    with pytest.raises(TypeError, match="argmax_rows takes 4 arguments, got 3"):
        bench.tape(planted(bench.step, lambda views: bench.step.argmax(views["ids"], 1, 1)))


# Debug mode.


def rebind(buffers: StaticBuffers, name: str) -> None:
    buffers._storages[name] = buffers.whole(name).clone()


@pytest.mark.parametrize("name", ["x", "normed", "logits"])
def test_debug_notices_a_rebound_buffer(bench: Bench, name: str) -> None:
    """Guards against a graph that goes on over the old storage while the host fills the new one."""
    graph = bench.tape(debug=True)
    bench.replay(graph, KEY, 2, seed=5)
    rebind(bench.buffers, name)
    with pytest.raises(CaptureError, match=f"static buffer {name} moved since capture"):
        graph.replay()


def test_debug_notices_released_buffers(bench: Bench) -> None:
    graph = bench.tape(debug=True)
    bench.buffers.release()
    with pytest.raises(CaptureError, match="static buffer x moved"):
        graph.replay()


def test_debug_notices_a_weight_whose_storage_was_swapped(bench: Bench) -> None:
    graph = bench.tape(debug=True)
    bench.step.weight.set_(torch.randn_like(bench.step.weight))
    with pytest.raises(CaptureError, match="a storage of call 1, linear_f32, moved"):
        graph.replay()


def test_debug_shows_scratch_read_before_it_is_written(bench: Bench) -> None:
    """Guards against a step that lives on what an earlier batch left behind.

    `rest` reads `normed`, which only the forgotten `norm` would write.
    """
    for _ in range(2):
        graph = bench.tape(bench.step.rest, debug=True)
        for seed in range(2):
            assert bench.replay(graph, KEY, 2, seed)["logits"].isnan().all()
    plain = bench.tape(bench.step.rest)
    bench.buffers.whole("normed").fill_(1)
    assert not bench.replay(plain, KEY, 2, 0)["logits"].isnan().any(), "the plant is invisible"


def test_debug_shows_an_output_that_was_not_written(bench: Bench) -> None:
    graph = bench.tape(bench.step.norm, debug=True)
    assert bench.replay(graph, KEY, 2, 0)["logits"].isnan().all()


def test_debug_shows_inputs_that_the_host_did_not_rewrite(bench: Bench) -> None:
    """Guards case 12: rows of an earlier, larger batch that nobody overwrote."""
    graph = bench.tape(debug=True)
    assert not bench.replay(graph, KEY, 2, 0)["logits"].isnan().any()
    bench.buffers.cell(KEY)["x"][: KEY.query_len] = 1  # one request; the other's rows are left
    graph.replay()
    logits = bench.buffers.cell(KEY)["logits"]
    assert not logits[: KEY.query_len].isnan().any()
    assert logits[KEY.query_len :].isnan().all()


def test_a_tape_over_boolean_and_float_inputs_records() -> None:
    """Guards the check of host writes, which compares bits, not NaN with NaN."""
    mask = BufferSpec(name="mask", shape=("R",), dtype=torch.bool, role="input")
    buffers = StaticBuffers(
        (*SPECS, mask),
        max_num_reqs=2,
        max_num_tokens=6,
        max_cell_tokens=6,
        device=torch.device("cpu"),
    )
    Bench(buffers, Step()).tape(debug=True)
