"""Capture-time configuration: which cells exist, how they are launched, how the pieces are
compiled.

Owns the user-facing `CaptureConfig` and its TOML form. Knows nothing of models or requests; sizes
that depend on the engine (`max_num_seqs`, `max_draft_tokens`) are handed to
`ShapeTable.from_config` beside it.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

GraphKind = Literal["auto", "cuda", "compiled", "tape", "eager"]
CompileMode = Literal["auto", "native", "triton", "inductor", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """How decode steps are captured.

    Args:
        graph: launcher of the captured step. `auto` is `cuda` on a CUDA device, else `tape`.
        num_reqs: ladder of batch sizes (requests, not tokens); None: the default ladder. The
            engine's `max_num_seqs` is always added.
        draft_lengths: ladder of draft lengths; None: 0, 1, 2, 3, 6 up to the configured maximum. 0
            and the maximum are always added.
        compile: how the step's small pieces run. `auto` is `native` on CPU (own C++ kernels, and
            torch's compiler is not even imported) and `triton` on a CUDA device (own Triton
            kernels); `inductor` compiles all glue with torch.compile; `off` runs it uncompiled.
            Each is a numerics identity of its own, bit-equal only to itself.
        lazy: capture a cell on its first use instead of at start. The first use of a cell is then
            slow.
        memory_budget: bytes that static buffers and graphs may take; None: unlimited. Exceeding it
            is an error at start that names the need. A `lazy` cell that would exceed it later is
            launched uncaptured, with the same results, and counted in `eager_fallbacks`.
        debug: at every replay tape and CUDA graphs check addresses, poison scratch, and refuse
            allocations and generators that move; tapes, too, ops that sync, draw random numbers or
            keep memory. Slow, for tests. The other kinds have nothing to check.
    """

    graph: GraphKind = "auto"
    num_reqs: tuple[int, ...] | None = None
    draft_lengths: tuple[int, ...] | None = None
    compile: CompileMode = "auto"
    lazy: bool = False
    memory_budget: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        _check_choice("graph", self.graph, get_args(GraphKind))
        _check_choice("compile", self.compile, get_args(CompileMode))
        object.__setattr__(self, "num_reqs", _ladder("num_reqs", self.num_reqs, minimum=1))
        object.__setattr__(
            self, "draft_lengths", _ladder("draft_lengths", self.draft_lengths, minimum=0)
        )
        for name in ("lazy", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"CaptureConfig.{name}={getattr(self, name)!r}: expected true or false"
                )
        budget = self.memory_budget
        if budget is not None and (
            isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0
        ):
            raise ValueError(
                f"CaptureConfig.memory_budget={budget!r}: expected a positive number of bytes "
                "or None"
            )

    @classmethod
    def from_toml(cls, path: str | Path) -> CaptureConfig:
        """Read the `[capture]` table of a TOML file (or its top level, where there is no such
        table).

        Raises:
            ValueError: unreadable file, bad TOML, or an unknown key (the message lists the known
                ones).
        """
        try:
            data: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"capture config {path}: cannot be read ({error.strerror})") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"capture config {path}: not valid TOML ({error})") from error
        table = data.get("capture", data)
        if not isinstance(table, dict):
            raise ValueError(f"capture config {path}: [capture] is not a table, but {table!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(table) - set(known))
        if unknown:
            raise ValueError(
                f"capture config {path}: unknown key {unknown[0]!r}; known keys: {', '.join(known)}"
            )
        return cls(**table)


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"CaptureConfig.{field}={value!r}: allowed are {', '.join(allowed)}")


def _ladder(field: str, values: object, *, minimum: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"CaptureConfig.{field}={values!r}: expected a non-empty list of integers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"CaptureConfig.{field}: {value!r} is not an integer >= {minimum}")
    return tuple(sorted(set(values)))
