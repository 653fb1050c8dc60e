"""Tokenizers: the wrapped tokenizer's ids and text, and incremental text equal to text at once."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from graphengine.models.detokenizer import IncrementalDetokenizer
from graphengine.models.loader import open_model
from graphengine.models.locate import locate_model
from graphengine.models.tokenizer import Tokenizer
from tests.tiny import BOS_ID, EOS_ID, make_checkpoint, make_gguf, make_tokenizer

CORPUS = (
    "Hello, world!",
    "  leading and   inner spaces\n\ttabs\r\n",
    "12345 + 67 = ?",
    "the other thing, naïve café, Größe, 東京, Привет, नमस्ते",
    "emoji 👩‍👩‍👧 and 🏳️‍🌈",
    "def f(x):\n    return x ** 2  # square\n",
    "",
    "<|im_start|>user\nHi<|im_end|>",
)
MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)
TINY = Tokenizer(make_tokenizer())


def byte_fallback_tokenizer() -> Tokenizer:
    """Sentencepiece-like: word pieces with a space mark, and bytes for what has no piece."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abc", "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    )


def templated(backend: Any) -> list[int]:
    """What transformers makes of `MESSAGES`, by way of the rendered text."""
    text = backend.apply_chat_template(list(MESSAGES), add_generation_prompt=True, tokenize=False)
    ids: list[int] = backend(text, add_special_tokens=False)["input_ids"]
    return ids


FALLBACK = byte_fallback_tokenizer()


@pytest.mark.parity
def test_directory_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    """Guards added or lost special tokens: one BOS too many moves every position."""
    directory = make_checkpoint(tmp_path)
    ours = open_model(directory).load_tokenizer()
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ids[0] == BOS_ID
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    rendered = theirs.apply_chat_template(
        list(MESSAGES), add_generation_prompt=True, tokenize=False
    )
    ids = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours.apply_chat_template(MESSAGES) == ids


@pytest.mark.parity
def test_gguf_tokenizer_equals_the_directorys(tmp_path: Path) -> None:
    """Guards GGUF files whose tokenizer is rebuilt from metadata: same ids and template."""
    checkpoint = make_checkpoint(tmp_path / "hf")
    ours = open_model(make_gguf(checkpoint, tmp_path / "m.gguf")).load_tokenizer()
    theirs = open_model(checkpoint).load_tokenizer()
    assert ours is not None
    assert theirs is not None
    for text in CORPUS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text.replace("<|im_start|>", "").replace(
            "<|im_end|>", ""
        )
    assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(MESSAGES)


@pytest.mark.slow
@pytest.mark.parity
def test_demo_tokenizer_gives_the_ids_of_transformers() -> None:
    """Guards the quick way in which the GGUF tokenizer is built."""
    path = locate_model("smollm2-135m").path
    ours = Tokenizer.load(path)
    theirs = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    for text in CORPUS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    rendered = theirs.apply_chat_template(
        list(MESSAGES), add_generation_prompt=True, tokenize=False
    )
    ids = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours.apply_chat_template(MESSAGES) == ids


def test_text_that_is_not_unicode_is_refused() -> None:
    """Guards against a TypeError from the depths of the tokenizer for bytes that were not UTF-8."""
    tokenizer = Tokenizer(make_tokenizer())
    text = b"ab\xff".decode(errors="surrogateescape")
    with pytest.raises(ValueError, match=r"not valid Unicode: .*U\+DCFF\) at character 2"):
        tokenizer.encode(text)
    with pytest.raises(ValueError, match=r"messages\[0\] is not valid Unicode"):
        tokenizer.apply_chat_template([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hi", "messages='hi'"),
        ({"role": "user", "content": "hi"}, "messages={"),
        ([], r"messages=\[\]"),
        (["hi"], r"messages\[0\]='hi': .*'role'"),
        ([*MESSAGES, {"role": "user"}], rf"messages\[{len(MESSAGES)}\].*'content'"),
        ([{"role": "user", "content": None}], r"messages\[0\].*'content'"),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, named: str) -> None:
    """Guards an AttributeError from inside for `chat("hi")`, or a template fed with None."""
    with pytest.raises(ValueError, match=named):
        TINY.apply_chat_template(messages)


def test_ids_beyond_the_tokenizer_decode_to_nothing() -> None:
    """Guards models with more rows than the tokenizer has ids: such an id must not raise."""
    ids = TINY.encode("ab")
    assert TINY.decode([*ids, 262, 10**6, -1]) == "ab"
    assert IncrementalDetokenizer(TINY).add([*ids, 262, 263]) == "ab"


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    """Guards base models: an error, not an invented format. So too messages that it refuses."""
    with pytest.raises(ValueError, match="no chat template"):
        FALLBACK.apply_chat_template(MESSAGES)
    strict = make_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        Tokenizer(strict).apply_chat_template(MESSAGES)


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    """Guards a traceback from the depths for a damaged download."""
    directory = make_checkpoint(tmp_path)
    file = directory / "tokenizer.json"
    headless = {key: value for key, value in json.loads(file.read_text()).items() if key != "model"}
    for damaged in ("{", "[]", "null", "{}", '{"model": 5}', json.dumps(headless)):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=rf"no tokenizer can be loaded from {directory}"):
            open_model(directory).load_tokenizer()


def stream(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], *, skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.add(ids[a:b]) for a, b in pairwise(bounds)]
    return "".join(pieces) + detokenizer.flush()


CUTS = st.lists(st.integers(0, 200), max_size=8)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=40), cuts=CUTS, skip=st.booleans())
def test_any_byte_ids_stream_to_the_full_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Guards streamed text that differs from the final one; invalid UTF-8, unknown ids too."""
    expected = TINY.decode(ids, skip_special_tokens=skip)
    assert stream(TINY, ids, cuts, skip=skip) == expected


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=16), cuts=CUTS)
def test_any_text_streams_to_itself(text: str, cuts: list[int]) -> None:
    """Guards multi-byte characters cut at every place: no U+FFFD that is not in the text."""
    ids = TINY.encode(text)
    assert stream(TINY, ids, cuts, skip=True) == text == TINY.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abc é東👍", max_size=20), cuts=CUTS, eos_at=st.integers(0, 20))
def test_space_marks_and_byte_fallback_stream_alike(
    text: str, cuts: list[int], eos_at: int
) -> None:
    """Guards sentencepiece-like decoders, which drop the space of whatever comes first."""
    ids = FALLBACK.encode(text)
    ids.insert(eos_at % (len(ids) + 1), 1)
    expected = FALLBACK.decode(ids)
    assert stream(FALLBACK, ids, cuts, skip=True) == expected


def test_incomplete_characters_are_held_back_then_shown() -> None:
    """Guards U+FFFD in the middle of a stream, and bytes lost at its end."""
    detokenizer = IncrementalDetokenizer(TINY)
    first, second, third = TINY.encode("€")[1:]
    assert detokenizer.add([first]) == ""
    assert detokenizer.add([second]) == ""
    assert detokenizer.add([third]) == "€"
    assert detokenizer.add([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_work_per_token_does_not_grow() -> None:
    """Guards quadratic detokenisation: decoding the whole text again for every token."""
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    invalid = TINY.encode("é")[2]  # a continuation byte, a thousand times
    for ids in (TINY.encode("word " * 200), [EOS_ID] * 1000, [263] * 1000, [invalid] * 1000):
        decoded = 0
        IncrementalDetokenizer(Counting(make_tokenizer())).add(ids)
        assert decoded <= 40 * len(ids)
