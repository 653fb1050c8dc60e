"""The page: one file that loads nothing, whose data comes back whatever an answer holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from graphengine.inspector import About, Recorder, write_page
from graphengine.inspector.page import _policy, render, to_json
from graphengine.inspector.texts import TokenTexts
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from tests.graphengine.inspector.recorded import HOSTILE, PROMPT, Run, serve, spelling, start

ABOUT = About(model="/a/private/folder/tiny", command="graphengine generate tiny")


class _Elements(HTMLParser):
    """Elements of a page with their attributes, and the text of its script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data


def _data(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_Elements(page).scripts[0])
    return data


def _page(run: Run) -> str:
    assert run.recorder is not None
    return render(run.recorder, ABOUT, run.engine)


@pytest.fixture(scope="module", params=["off", "ngram", "rejection", "eagle"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    engine = start(request.param)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3)
    sampled = replace(params, temperature=0.9, seed=1, n=2)
    yield serve(
        engine,
        [
            ("hostile", PROMPT, spelling(engine, HOSTILE)),
            ("two", PROMPT, sampled),
            ("a", "x", params),
        ],
        record=True,
    )
    engine.close()


def test_the_page_loads_nothing(run: Run) -> None:
    """Guards against a font, script, image or link: a page must be readable anywhere, for ever."""
    page = _page(run)
    elements = _Elements(page)
    for tag, attributes in elements.found:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "a"}
        assert not {"src", "href", "action", "srcset"} & set(attributes)
    assert len(elements.scripts) == 2, "an answer has ended its script element"
    own = page.replace(elements.scripts[0], "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp|import\(", own)
    assert "default-src 'none'" in page
    assert "private" not in page


def test_what_was_written_comes_back(run: Run) -> None:
    """Guards text that is lost, doubled or changed between the engine and the page."""
    data = _data(_page(run))
    by_name = {one["name"]: one for one in data["answers"]}
    assert list(by_name) == ["hostile", "two", "two#1", "a"]
    hostile = by_name["hostile"]
    texts = [
        hostile["texts"].get(str(index), data["vocab"][str(token_id)])
        for index, token_id in enumerate(hostile["ids"])
    ]
    assert "".join(texts) == HOSTILE
    assert texts[HOSTILE.encode().index("🙂".encode()) :][:4] == ["", "", "", "🙂"]
    for answer in data["answers"]:
        assert len(answer["origins"]) == len(answer["ids"]) == len(answer["likely"])
        assert sum(visit[2] for visit in answer["visits"]) == len(answer["ids"])
        drafted = {token for visit in answer["visits"] for token in visit[4]}
        likely = {token for row in answer["likely"] for token in row[2::2]}
        assert {str(token) for token in drafted | likely} <= set(data["vocab"])
        assert all(visit[0] < len(data["steps"]) for visit in answer["visits"])


def test_nothing_in_data_is_markup() -> None:
    """Guards the one place where a model's text meets HTML, alone and inside words."""
    text = to_json([HOSTILE, "\ud800"])
    assert text.isascii()
    assert not set("<>&\n\r\u2028") & set(text)
    assert json.loads(text) == [HOSTILE, "\ud800"]


def test_who_drafted_is_said(run: Run) -> None:
    """Guards a probability that is claimed for copied text, and one that is left out."""
    data = _data(_page(run))
    visits = [visit for answer in data["answers"] for visit in answer["visits"] if visit[4]]
    speculative = run.engine.resolved.speculative
    if speculative is None:
        assert not visits
        assert not data["about"]["speculative"]
        assert {letter for one in data["answers"] for letter in one["origins"]} == {"p"}
        return
    method = speculative.method
    assert visits
    assert data["about"]["exact"] == (speculative.verification == "exact")
    promise = "the same as" if speculative.verification == "exact" else "distributed as"
    assert data["about"]["promise"] == f"{promise} without guessing"
    assert all((visit[7] is not None) == (method == "draft_model") for visit in visits)
    copied = {visit[5] for visit in visits}
    assert copied == {"ngram": {1}, "eagle": {0, 1}, "draft_model": {0}}[method]
    if method == "ngram":
        assert all(visit[6] > 0 for visit in visits)


def test_without_log_probabilities_or_a_tokenizer(tmp_path: Path) -> None:
    """Guards a page that needs what a library call may not have asked for."""
    engine = start("ngram", max_num_seqs=1)
    with Recorder(engine) as recorder:
        pass
    assert _data(render(recorder, ABOUT, engine))["answers"] == []
    run = serve(engine, [("one", PROMPT, SamplingParams(max_tokens=5))], record=True)
    assert run.recorder is not None
    write_page(tmp_path / "page.html", run.recorder, ABOUT, engine)
    (answer,) = _data((tmp_path / "page.html").read_text(encoding="utf-8"))["answers"]
    assert answer["likely"] is None
    bare = TokenTexts(None)
    assert bare.in_place([3, 4]) == ["#3 ", "#4 "]
    engine.close()


def test_an_answer_stays_small(run: Run) -> None:
    """Guards data that grows with what was possible, not with what was written."""
    page = _page(run)
    count = sum(len(answer["ids"]) for answer in _data(page)["answers"])
    empty = len(page) - len(_Elements(page).scripts[0])
    assert empty < 40_000
    assert (len(page) - empty) / count < 250


@pytest.mark.parametrize(
    ("adaptive", "words"),
    [
        (True, "adaptive: whichever of 0, 1, 3 pays best"),
        (False, "always up to 3"),
        ("threshold", "3, fewer while under 40 % are accepted"),
        ({1: 3, 4: 0}, "3 from 1 requests on, 0 from 4 requests on"),
    ],
)
def test_the_choice_of_a_length_in_words(adaptive: Any, words: str) -> None:
    """Guards a page that says nothing, or another policy, of how k was chosen."""
    config = SpeculativeConfig("ngram", max_draft_tokens=3, adaptive=adaptive)
    assert _policy(config, (0, 1, 3)) == words
