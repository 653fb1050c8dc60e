"""The page: a recording as one HTML file that needs nothing else.

Owns how style, script and data are put into the template, and what the page says of the run. No
text of a model can leave its place: data is JSON in a script element, written so that nothing in it
is markup, and the page's own policy lets it load nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graphengine.config import Numerics
from graphengine.engine import Engine
from graphengine.inspector.page_data import page_data
from graphengine.inspector.recorder import Recorder, Visit
from graphengine.inspector.texts import TokenTexts
from graphengine.speculative_config import SpeculativeConfig

_HERE: Final = Path(__file__).parent
# What could end the script element, begin another or a comment, or be a reference.
_MARKUP: Final = {ord(one): f"\\u{ord(one):04x}" for one in "<>&"}


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a reader should know of a run.

    Args:
        model: as the user named it; of a path its last part is shown.
        command: the command line, without private paths; "": none.
    """

    model: str
    command: str = ""

    def data(self, engine: Engine) -> dict[str, Any]:
        """For the page; `facts` in the order in which they are shown."""
        speculative = engine.resolved.speculative
        facts = [("Model", Path(self.model).name)]
        if speculative is None:
            facts.append(("Speculation", "off"))
        else:
            facts += [
                ("Drafts from", _proposer(speculative)),
                ("Draft length", _policy(speculative, engine.resolved.table.draft_lengths)),
                ("Verification", speculative.verification),
            ]
        dtype = str(engine.resolved.dtype).removeprefix("torch.")
        facts.append(("Computed in", f"{dtype} on {engine.resolved.device.type}"))
        return {
            "facts": facts,
            "command": self.command,
            "speculative": speculative is not None,
            "exact": speculative is None or speculative.verification == "exact",
            "promise": _promise(speculative, engine.config.numerics),
            "adaptive": speculative is not None and speculative.adaptive is not False,
            "sampling": None if speculative is None else speculative.draft_sampling,
            "async": engine.resolved.async_steps > 0,
        }


def render(recorder: Recorder, about: About, engine: Engine) -> str:
    """The page of all that has been recorded."""
    speculative = engine.resolved.speculative
    has_model = engine.proposer is not None and engine.proposer.produces_probs
    texts = TokenTexts(engine.tokenizer)

    def copies(visit: Visit) -> bool:
        if not has_model or speculative is None or speculative.override is None:
            return not has_model
        return (visit.match_length or 0) >= speculative.override_min_match

    data = page_data(recorder, texts, copies) | {"about": about.data(engine)}
    page = _part("page.html")
    parts = {name: _part(name) for name in ("page.css", "page.js", "charts.js")}
    for name, text in (parts | {"data": to_json(data)}).items():  # data last: it may hold anything
        before, after = page.split(f"@@{name}@@")
        page = before + text + after
    return page


def write_page(path: Path, recorder: Recorder, about: About, engine: Engine) -> None:
    """Write the page; OSError where it cannot be written."""
    path.write_text(render(recorder, about, engine), encoding="utf-8")


def to_json(data: object) -> str:
    """JSON in ASCII that may stand in a script element whatever it holds."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_MARKUP)


def _part(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8").strip()


def _proposer(speculative: SpeculativeConfig) -> str:
    name = speculative.method
    if speculative.model is not None:
        name += f" ({Path(speculative.model).name})"
    if speculative.override is not None:
        name += f", {speculative.override} where it matches {speculative.override_min_match} tokens"
    return name


def _promise(speculative: SpeculativeConfig | None, numerics: Numerics) -> str:
    """What holds of the text, to follow "the text is"."""
    if speculative is not None and speculative.verification != "exact":
        return "distributed as without guessing"
    near = "" if numerics == "invariant" else " but for near-ties (numerics=fast)"
    return f"the same as without guessing{near}"


def _policy(speculative: SpeculativeConfig, lengths: tuple[int, ...]) -> str:
    adaptive, most = speculative.adaptive, speculative.max_draft_tokens
    if adaptive is True:
        return f"adaptive: whichever of {', '.join(map(str, lengths))} pays best"
    if adaptive is False:
        return f"always up to {most}"
    if adaptive == "threshold":
        return f"{most}, fewer while under 40 % are accepted"
    return ", ".join(f"{drafts} from {size} requests on" for size, drafts in adaptive)
