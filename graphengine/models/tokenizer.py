"""Text to token ids and back: a thin wrapper over a transformers tokenizer.

Files on this machine only. Building the tokenizer of a GGUF file takes seconds, so the result is
kept in `$GRAPHENGINE_CACHE_DIR` (default `~/.cache/graphengine`) and found again by the file's
identity. Incremental decoding is in `detokenizer.py`.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Tokenizer:
    """Encodes, decodes and applies the chat template exactly as the wrapped tokenizer does.

    Args:
        backend: A transformers tokenizer.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._num_ids = len(backend)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """From a Hugging Face directory or a .gguf file.

        Raises:
            ValueError: No tokenizer can be built from the files.
        """
        return cls(_load_gguf(path) if path.is_file() else _load_directory(path))

    @property
    def num_ids(self) -> int:
        """Number of ids that the tokenizer knows; a model's vocabulary may be larger."""
        return self._num_ids

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-text id, if any; a model config may name more."""
        eos = self._backend.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens (BOS) that the tokenizer itself adds."""
        return list(self._backend(text, verbose=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a token sequence; ids beyond the tokenizer's last one decode to nothing."""
        known = [i for i in token_ids if 0 <= i < self._num_ids]
        text: str = self._backend.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next answer starts.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.

        Raises:
            ValueError: The tokenizer has no chat template, or the template refuses the messages.
        """
        from jinja2 import TemplateError  # with transformers, loaded only where a template is used

        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template; pass a plain prompt instead")
        try:
            encoded = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(encoded["input_ids"])


def _load_directory(path: Path) -> Any:
    # Imported here because transformers takes seconds to import and token-id prompts need none of
    # it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, KeyError, ValueError, ImportError) as error:
        raise ValueError(f"no tokenizer can be loaded from {path}: {error}") from error


def _load_gguf(path: Path) -> Any:
    cached = _cache_folder(path)
    if cached.is_dir():
        return _load_directory(cached)
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    except (OSError, KeyError, ValueError, ImportError) as error:
        raise ValueError(f"no tokenizer can be built from {path}: {error}") from error
    _keep(backend, cached)
    return backend


def _cache_folder(path: Path) -> Path:
    """Where the tokenizer built from this file, as it is now, by this transformers, is kept."""
    import transformers

    stat = path.stat()
    identity = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, transformers.__version__)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:20]
    root = os.environ.get("GRAPHENGINE_CACHE_DIR") or Path.home() / ".cache" / "graphengine"
    return Path(root) / "tokenizers" / digest


def _keep(backend: Any, folder: Path) -> None:
    """Save for the next start. A cache that cannot be written costs time there and nothing else."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:
        return
    try:
        backend.save_pretrained(scratch)
        scratch.rename(folder)  # whole or not at all, whoever else starts at the same time
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
