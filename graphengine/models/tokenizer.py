"""Text to token ids and back: a thin wrapper over a transformers tokenizer.

Files on this machine only. Knows nothing of models, whose vocabulary may be larger than the
tokenizer's. Incremental decoding is in `detokenizer.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Tokenizer:
    """Encodes, decodes and applies the chat template exactly as the wrapped tokenizer does.

    Args:
        backend: A transformers tokenizer.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._num_ids = max(backend.get_vocab().values(), default=-1) + 1
        self._special_ids = frozenset(
            token_id for token_id, token in backend.added_tokens_decoder.items() if token.special
        )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """From a Hugging Face directory or a .gguf file.

        Raises:
            ValueError: No tokenizer can be built from the files.
        """
        return cls(_load_gguf(path) if path.is_file() else _load_directory(path))

    def save(self, folder: Path) -> None:
        """Write its files beside a checkpoint."""
        self._backend.save_pretrained(folder)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def tokens(self) -> dict[int, str]:
        """Every id and the text or bytes that it stands for, as the tokenizer spells them."""
        return {token_id: token for token, token_id in self._backend.get_vocab().items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens (BOS) that the tokenizer itself adds.

        Raises:
            ValueError: The text is not valid Unicode.
        """
        check_unicode("text", text)
        return list(self._backend(text, verbose=False)["input_ids"])

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text without any special tokens around it.

        Raises:
            ValueError: The text is not valid Unicode.
        """
        check_unicode("text", text)
        return list(self._backend(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a token sequence; ids beyond the tokenizer's last one decode to nothing."""
        known = [i for i in token_ids if 0 <= i < self._num_ids]
        text: str = self._backend.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def is_visible(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` looks at this id at all: it is the tokenizer's, and is not skipped."""
        if not 0 <= token_id < self._num_ids:
            return False
        return not (skip_special_tokens and token_id in self._special_ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next answer starts.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.

        Raises:
            ValueError: The tokenizer has no chat template, the template refuses the messages, or
                one is not a mapping of that form, or not valid Unicode.
        """
        from jinja2 import TemplateError  # with transformers, loaded only where a template is used

        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template; pass a plain prompt instead")
        _check_messages(messages)
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


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f'messages={messages!r}: expected a list of {{"role", "content"}}')
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(
                    f"messages[{index}]={message!r}: expected a mapping with text as {key!r}"
                )
        check_unicode(f"messages[{index}]", message["content"])


def check_unicode(name: str, text: str) -> None:
    """Refuse lone surrogates, which Python makes of bytes that are not UTF-8.

    Raises:
        ValueError: There is one; the message names the text by `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: a lone surrogate (U+{ord(text[error.start]):04X}) at "
            f"character {error.start}; was it read from something other than UTF-8?"
        ) from error


def _load_directory(path: Path) -> Any:
    # Imported here because transformers takes seconds to import and token-id prompts need none of
    # it.
    from transformers import AutoTokenizer

    with _Naming(path):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _load_gguf(path: Path) -> Any:
    # Not AutoTokenizer, which reads the whole header once more (seconds) to end at this class.
    from transformers import PreTrainedTokenizerFast

    with _Naming(path):
        return PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )


class _Naming:
    """Makes errors of damaged files, which come from several depths, a ValueError that names them.

    The tokenizers package raises Exception itself, which no except clause can name without its
    subclasses.
    """

    _KINDS = (OSError, LookupError, ValueError, ImportError, TypeError, AttributeError)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is Exception or isinstance(error, self._KINDS):
            raise ValueError(f"no tokenizer can be loaded from {self._path}: {error}") from error
