"""Which proposer drafts, how many drafts a step carries and how they are verified: what a user may
set of speculation.

Owns `SpeculativeConfig` and its checks, which need no weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphengine.checks import check_integer
from proposers import registry
from proposers.base import DraftSampling
from proposers.info import ProposerInfo

SPECULATE_VARIABLE = "GRAPHENGINE_SPECULATE"
MAX_DRAFT_TOKENS = 64
OFF = "off"
DEFAULT_MIN_MATCH = 4  # tokens of a match that overrides a model
SHORT_DRAFT = 2  # drafts of a step while `adaptive="threshold"` finds acceptance low

Adaptive = bool | Literal["threshold"] | tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, init=False)
class SpeculativeConfig:
    """Which proposer drafts, and how its drafts are verified.

    A value: `dataclasses.replace` changes fields and options and keeps the rest.

    Args:
        method: registered proposer name; `graphengine proposers` lists them.
        model: path of the draft model, for proposers that carry one; others refuse it.
        max_draft_tokens: most drafts a request may have in one step (k), 1 to 64.
        verification: `exact`: output is token-identical to no speculation. `rejection`: output is
            distributed as without (Leviathan et al. 2023), and greedy requests are identical; the
            same seed gives the same tokens only where the same drafts come with the same steps.
        draft_sampling: `greedy`: a draft is the proposer's likeliest token. The others need a
            proposer that has a distribution. `coupled`: it is the likeliest under the noise that
            will choose the target's token, which makes the two agree more often where tokens are
            sampled; needs `exact`. `probabilistic`: it is drawn from the distribution; needs
            `rejection`, as `exact` would accept it too seldom.
        adaptive: how many drafts a step carries. True: of the captured lengths the one with the
            most expected tokens a second, by acceptance so far and the measured cost of steps; off
            is one of them. False: always k. `threshold`: 2 instead of k while the moving average
            of acceptance is under 40 %. A mapping: k by the least number of requests, 1 among
            them: {1: 6, 4: 3, 9: 0}. No choice changes a token; with `rejection`, it changes which
            tokens are sampled, and not their distribution.
        self_check: `error`, `warn` or `off`: what to do where a model-carrying proposer accepts
            near chance at load. Others have nothing to check, and refuse all but the default.
        override: a proposer that matches text, `ngram` or `suffix`: where its match is long, its
            drafts replace the model's for that row. For proposers that carry a model.
        override_min_match: how many tokens make a match long; no more than `override` looks up.
        options: options of the proposer itself as (name, value) pairs or a mapping; a short form
            is to pass them by name.
        named_options: these win over `options`.

    Attributes:
        options: all of the proposer's options, defaults included, as (name, value) pairs.

    Raises:
        ValueError: a field or an option has a value that is not allowed, or the proposer is unknown
            or not supported.
    """

    method: str
    model: str | None
    max_draft_tokens: int
    verification: str
    draft_sampling: DraftSampling
    adaptive: Adaptive
    self_check: str
    override: str | None
    override_min_match: int
    options: tuple[tuple[str, object], ...]

    def __init__(
        self,
        method: str,
        *,
        model: str | Path | None = None,
        max_draft_tokens: int = 6,
        verification: str = "exact",
        draft_sampling: DraftSampling = "greedy",
        adaptive: bool | str | Mapping[int, int] | Iterable[tuple[int, int]] = True,
        self_check: str = "error",
        override: str | None = None,
        override_min_match: int = DEFAULT_MIN_MATCH,
        options: Mapping[str, object] | Iterable[tuple[str, object]] = (),
        **named_options: object,
    ) -> None:
        info = registry.find(method).info
        resolved = info.resolve({**dict(options), **named_options})
        if max_draft_tokens == 0:
            raise ValueError(
                f"max_draft_tokens={max_draft_tokens}: expected an integer from 1 to "
                f'{MAX_DRAFT_TOKENS}; to turn speculation off pass speculative="off"'
            )
        check_integer("max_draft_tokens", max_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if verification not in ("exact", "rejection"):
            raise ValueError(f"verification={verification!r}: allowed are exact, rejection")
        _check_draft_sampling(draft_sampling, verification, info)
        if self_check not in ("error", "warn", "off"):
            raise ValueError(f"self_check={self_check!r}: allowed are error, warn, off")
        _check_model(model, info)
        if self_check != "error" and info.model == "none":
            raise ValueError(
                f"self_check={self_check!r}: proposer {method!r} carries no model; leave it out"
            )
        _check_override(override, override_min_match, info)
        fields: dict[str, object] = {
            "method": method,
            "model": None if model is None else str(model),
            "max_draft_tokens": max_draft_tokens,
            "verification": verification,
            "draft_sampling": draft_sampling,
            "adaptive": _resolve_adaptive(adaptive, max_draft_tokens),
            "self_check": self_check,
            "override": override,
            "override_min_match": override_min_match,
            "options": tuple(resolved.items()),
        }
        for name, given in fields.items():
            object.__setattr__(self, name, given)

    @property
    def chosen_lengths(self) -> tuple[int, ...]:
        """Draft lengths that a rule of `adaptive` may choose, which must be captured."""
        if isinstance(self.adaptive, bool):
            return ()
        if self.adaptive == "threshold":
            return (min(SHORT_DRAFT, self.max_draft_tokens),)
        return tuple(sorted({length for _, length in self.adaptive}))

    @classmethod
    def resolve(
        cls, given: SpeculativeConfig | str | None, **fields: Any
    ) -> SpeculativeConfig | None:
        """The configuration that an argument means; None: speculation is off.

        The one place that reads the environment.

        Args:
            given: a configuration; `off`, a proposer's name, or `name:k`; None: the text in
                `GRAPHENGINE_SPECULATE`, or off where that is unset.
            fields: of a configuration that is given as text.

        Raises:
            ValueError: anything else.
        """
        if isinstance(given, SpeculativeConfig):
            return given
        source = SPECULATE_VARIABLE if given is None else "speculative"
        text = os.environ.get(SPECULATE_VARIABLE, OFF) if given is None else given
        if not isinstance(text, str):
            raise ValueError(
                f"{source}={text!r}: expected a SpeculativeConfig, off, NAME or NAME:K"
            )
        if text.strip() in ("", OFF):
            return None
        method, colon, length = text.strip().partition(":")
        if colon and not (length.isascii() and length.isdecimal()):
            raise ValueError(f"{source}={text!r}: expected off, NAME or NAME:K with K an integer")
        if length:
            fields["max_draft_tokens"] = int(length)
        try:
            return cls(method, **fields)
        except ValueError as error:
            raise ValueError(f"{source}={text!r}: {error}") from error


def _resolve_adaptive(given: object, most: int) -> Adaptive:
    """The choice that an argument means; a mapping as ascending pairs."""
    if isinstance(given, bool):
        return given
    if given == "threshold":
        return "threshold"
    problem = (
        f"adaptive={given!r}: expected True, False, 'threshold', or a mapping of a number of "
        f"requests, 1 among them, to 0 to {most} drafts (max_draft_tokens)"
    )
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ValueError(problem)
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    for pair in pairs:
        numbers = pair if isinstance(pair, tuple) and len(pair) == 2 else (0, 0)
        if not all(type(number) is int for number in numbers) or not (
            numbers[0] >= 1 and 0 <= numbers[1] <= most
        ):
            raise ValueError(problem)
    if len(dict(pairs)) < len(pairs) or 1 not in dict(pairs):
        raise ValueError(problem)
    return tuple(sorted(pairs))


def _check_model(model: object, info: ProposerInfo) -> None:
    if model is None and info.model == "required":
        raise ValueError(
            f"model=None: proposer {info.name!r} needs the path of a checkpoint, such as "
            f'SpeculativeConfig({info.name!r}, model="/path/to/checkpoint"), on the command line '
            "--draft-model"
        )
    if model is None:
        return
    if not isinstance(model, str | Path) or not str(model):
        none = "" if info.model == "required" else ", or None"
        raise ValueError(f"model={model!r}: expected the path of a checkpoint{none}")
    if info.model == "none":
        raise ValueError(
            f"model={str(model)!r}: proposer {info.name!r} carries no model; leave it out"
        )


def _check_override(override: str | None, min_match: int, info: ProposerInfo) -> None:
    if override is None:
        if min_match != DEFAULT_MIN_MATCH:
            raise ValueError(
                f"override_min_match={min_match!r}: there is no override; leave it out"
            )
        return
    longest = {one.name: one.longest_match for one in registry.infos() if one.longest_match}
    if override not in longest:
        raise ValueError(f"override={override!r}: allowed are None, {', '.join(longest)}")
    check_integer("override_min_match", min_match, 1, longest[override])
    if info.model == "none":
        raise ValueError(
            f"override={override!r}: proposer {info.name!r} carries no model whose drafts could be "
            "replaced; leave it out"
        )


def _check_draft_sampling(value: str, verification: str, info: ProposerInfo) -> None:
    if value == "greedy":
        return
    allowed = "greedy, coupled, probabilistic" if info.produces_probs else "greedy"
    if value not in ("coupled", "probabilistic") or not info.produces_probs:
        why = "" if info.produces_probs else ", which has no distribution"
        raise ValueError(
            f"draft_sampling={value!r}: allowed with proposer {info.name!r}{why}: {allowed}"
        )
    if value == "probabilistic" and verification != "rejection":
        raise ValueError(
            "draft_sampling='probabilistic' with verification='exact' would accept too seldom: "
            "use verification='rejection', or draft_sampling='coupled' or 'greedy'"
        )
    if value == "coupled" and verification != "exact":
        raise ValueError(
            "draft_sampling='coupled' with verification='rejection', which does not choose by "
            "that noise: use verification='exact', or draft_sampling='probabilistic' or 'greedy'"
        )


def adaptive_of(text: str) -> bool | str | dict[int, int]:
    """What a text, such as the flag `--adaptive`, means in a SpeculativeConfig.

    Raises:
        ValueError: neither on, off, threshold nor a table.
    """
    if text in ("on", "off"):
        return text == "on"
    if text == "threshold":
        return text
    pairs = [part.split(":") for part in text.split(",")]
    if not all(len(pair) == 2 and all(one.strip().isdecimal() for one in pair) for pair in pairs):
        raise ValueError(
            f"adaptive {text!r}: expected on, off, threshold, or drafts by number of requests "
            "such as 1:6,4:3,9:0"
        )
    return {int(size): int(length) for size, length in pairs}
