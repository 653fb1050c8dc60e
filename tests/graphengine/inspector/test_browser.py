"""The page in a browser: it draws itself without an error, whatever the answer holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from graphengine.inspector import About
from graphengine.inspector.page import render, to_json
from graphengine.sampling.params import SamplingParams
from tests.graphengine.inspector.recorded import HOSTILE, PROMPT, serve, spelling, start

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the path"),
]

# What a reader does: go through tokens by key, hover, switch, choose another answer. What comes of
# it is written into the document, errors too.
WATCH = "<script>const errors=[];addEventListener('error',one=>errors.push(one.message))</script>"
USE = """<script>
const tokens = () => [...document.querySelectorAll("#answer .t")];
const press = key => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const seen = [];
const pick = document.getElementById("pick");
for (let place = 0; place < pick.options.length; place++) {
  pick.value = place;
  pick.dispatchEvent(new Event("change"));
  const all = tokens();
  all[0].focus();
  for (const key of ["Right", "Down", "Left", "Up", "Right"]) press("Arrow" + key);
  for (const key of ["End", "ArrowRight", "ArrowLeft", "Home"]) press(key);
  const back = document.activeElement === all[0];
  for (const one of all) {
    one.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    if (!document.getElementById("detail").textContent.includes("id ")) errors.push("no detail");
  }
  seen.push(`${all.length} ${back} ${all.map(one => one.textContent).join("") === wanted[place]}`);
}
pick.value = 1;
pick.dispatchEvent(new Event("change"));
for (const name of ["show-ghosts", "show-steps"]) document.getElementById(name).click();
seen.push(document.querySelectorAll(".ghost").length);
document.body.dataset.seen = seen.join("; ");
document.body.dataset.errors = errors.join("; ");
</script>"""


def _dump(page: Path, out: Path) -> str:
    """The document of a page once it has drawn itself."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--disable-gpu", f"--user-data-dir={out}", "--dump-dom"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def _attribute(dom: str, name: str) -> str:
    found = re.search(f'data-{name}="([^"]*)"', dom)
    assert found is not None, f"the script did not come to its end: {dom[-2000:]}"
    return unescape(found.group(1))


@pytest.mark.parametrize("method", ["off", "ngram", "eagle", "rejection"])
def test_the_page_draws_every_token(method: str, tmp_path: Path) -> None:
    """Guards errors of the script, tokens that are not drawn, and markup in an answer that runs."""
    engine = start(method)
    params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=5)
    requests = [
        ("hostile", PROMPT, spelling(engine, HOSTILE)),
        ("plain", PROMPT, params),
        ("unrecorded", "x = ", SamplingParams(max_tokens=1)),
    ]
    run = serve(engine, requests, record=True)
    assert run.recorder is not None
    page = render(run.recorder, About(model="tiny"), engine)
    assert engine.tokenizer is not None
    counts, texts = [], []
    for output in run.outputs.values():
        counts.append(len(output.outputs[0].token_ids))
        texts.append(output.outputs[0].text)
    rejected = sum(
        visit.num_accepted < min(len(visit.draft_ids), len(visit.token_ids))
        for visit in run.recorder.answers()[1].visits
    )
    engine.close()
    file = tmp_path / "page.html"
    wanted = "<script>const wanted=" + to_json(texts) + "</script>"
    use = page.replace("<body>", "<body>" + WATCH).replace("</body>", wanted + USE + "</body>")
    file.write_text(use, encoding="utf-8")
    dom = _dump(file, tmp_path / "profile")
    assert _attribute(dom, "errors") == ""
    *answers, ghosts = _attribute(dom, "seen").split("; ")
    assert answers == [f"{count} true true" for count in counts]
    assert int(ghosts) == rejected
    assert rejected or method in ("off", "ngram")
