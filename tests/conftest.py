"""Settings for the whole test run: offline, seeded, and unaffected by the user's environment.

Environment variables are set here, at import, because torch and transformers read some of theirs
when they are imported, and conftest.py is imported before any test module.
"""

import gc
import os
import signal
import socket
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Or every process that compiles starts workers that import torch, for seconds.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Triton kernels run on tensors of the CPU; `make gpu` sets 0: compiled, on the device.
os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ["TRITON_INTERPRET"] == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `device="auto"` is the CPU in all other tests
for _name in [name for name in os.environ if name.startswith("GRAPHENGINE_")]:
    # A developer's defaults must not decide what a test sees. The compile cache may stay.
    if _name != "GRAPHENGINE_CACHE_DIR":
        del os.environ[_name]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So do shells start what they start in the background; the tests of Ctrl-C need it to arrive.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# Shared machines stall: a per-example deadline fails on load, not on bugs. Derandomised in CI, so
# that a red run can be repeated.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


# Where Triton kernels are interpreted, which takes a second or so a launch.
INTERPRETED = ("graphengine/triton_kernels", "gpu", "parity/test_triton_engine.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by folder, and skips, visibly, what needs a GPU where there is none."""
    here = Path(__file__).parent
    places = [here / place for place in INTERPRETED]
    for item in items:
        if any(item.path.is_relative_to(place) for place in places):
            item.add_marker(pytest.mark.interpreted)
    _skip_gpu(items)


def pytest_collection_finish() -> None:
    """Leave what was imported out of later collections: a million objects that nobody drops."""
    gc.collect()
    gc.freeze()


def _skip_gpu(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        reason = "needs a CUDA device"
    elif os.environ["TRITON_INTERPRET"] != "0":
        reason = "needs compiled kernels: TRITON_INTERPRET=0, as `make gpu` sets it"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that connects to anything but this machine: tests never download."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else None
        if host is not None and not (host in ("localhost", "::1") or host.startswith("127.")):
            raise AssertionError(f"a test tried to connect to {address!r}; tests never download")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Gives every test the same random state, whatever ran before it."""
    torch.manual_seed(0)
