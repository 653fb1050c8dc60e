"""A proposer as somebody else would write it: one module that knows only proposers.

It repeats the newest token.
"""

from collections.abc import Mapping

from proposers import (
    Draft,
    HostProposer,
    OptionInfo,
    ProposeInputs,
    ProposerInfo,
    ProposerSpec,
    Runtime,
    integers,
)

INFO = ProposerInfo(
    name="repeat-last",
    summary="repeats the newest token",
    kind="host",
    interface="1",
    options=(OptionInfo(name="times", default=3, doc="how often, tokens", rule=integers(1, 64)),),
)


class RepeatLast(HostProposer):
    name = INFO.name

    def __init__(self, times: int) -> None:
        self.times = times

    def propose(self, inputs: ProposeInputs) -> Draft:
        rows = [
            [int(history[-1])] * min(self.times, allowance)
            for history, allowance in zip(
                inputs.token_ids, inputs.num_draft_tokens.tolist(), strict=True
            )
        ]
        return Draft.from_rows(rows, inputs.k)


def build(options: Mapping[str, object], runtime: Runtime) -> RepeatLast:
    times = options["times"]
    assert isinstance(times, int)
    return RepeatLast(times)


SPEC = ProposerSpec(info=INFO, factory=build)
