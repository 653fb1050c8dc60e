"""A picture of one step for each way to launch it: phases above, work below, on one scale.

Owns the drawing. Which step is shown: the median one of the trace, so that no stall is sold as the
rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from graphengine.tracing import PHASES, STEP
from profiles.trace import BETWEEN, DEVICE, LAUNCHES, Event

_LANES: Final = ("phases", "launches", "device")


def median_step(events: Sequence[Event]) -> Event:
    """The step of median length."""
    steps = [one for one in events if one.kind == "range" and one.name == STEP]
    steps.sort(key=lambda one: one.end - one.start)
    return steps[len(steps) // 2]


def bars(events: Sequence[Event]) -> dict[str, list[tuple[float, float, str]]]:
    """Bars (start, length, name) of the median step by lane, in milliseconds from its beginning."""
    step = median_step(events)
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in _LANES}
    for event in sorted(events, key=lambda one: (one.start, -one.end)):
        if event.kind == "range":
            lane = "phases"
        elif event.kind in LAUNCHES:
            lane = "launches"
        elif event.kind in DEVICE:
            lane = "device"
        else:
            continue
        if step.start <= event.start < step.end:
            name = BETWEEN if event.name == STEP else event.name
            bar = ((event.start - step.start) / 1e3, (event.end - event.start) / 1e3, name)
            found[lane].append(bar)
    return {name: lane for name, lane in found.items() if lane}


def draw(traces: Mapping[str, Sequence[Event]], title: str, out: Path) -> None:
    """One panel a trace, to a PNG file."""
    # Here, because the rest of a profile works without it.
    import matplotlib
    from matplotlib.patches import Patch

    matplotlib.use("Agg")
    from matplotlib import pyplot

    palette = pyplot.get_cmap("tab10")
    colours: dict[str, Any] = {name: palette(index) for index, name in enumerate(PHASES)}
    colours[BETWEEN] = "lightgrey"
    figure, axes = pyplot.subplots(
        len(traces), 1, sharex=True, squeeze=False, figsize=(10, 1 + 1.3 * len(traces))
    )
    for axis, (name, events) in zip(axes[:, 0], traces.items(), strict=True):
        lanes = bars(events)
        for place, found in enumerate(lanes.values()):
            spans = [(start, length) for start, length, _ in found]
            # Launches and kernels in turn dark and light, so that each can be seen.
            fill = [
                colours.get(one, ("black", "darkgrey")[index % 2])
                for index, (_, _, one) in enumerate(found)
            ]
            axis.broken_barh(spans, (-place - 0.4, 0.8), facecolors=fill, linewidth=0)
            axis.set_yticks([-place for place in range(len(lanes))], list(lanes))
        axis.set_title(name, fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("milliseconds from the beginning of the step, under the profiler")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, ncols=len(handles), fontsize=7, loc="lower center")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
