"""Where what a rank was given differs from what the replay would give it: rank, part, and the first sample.

It trusts `Work.digests` alone, which the run and the replay both call.
"""

from collections.abc import Sequence

from asyncrl.engine.events.types import WorkGiven
from asyncrl.engine.records.work import Work


def unlike(recorded: WorkGiven, works: Sequence[Work]) -> str:
    """Say in which part the first rank's work that differs does; empty where no rank's does."""
    if {len(recorded.parts), len(recorded.samples)} != {len(works)}:
        return f"the {recorded.stage} stage has {len(recorded.parts)} ranks in the log, {len(works)} in the replay"
    for rank, (parts, samples, work) in enumerate(zip(recorded.parts, recorded.samples, works, strict=True)):
        mine = work.digests
        names = [name for name in {**mine, **parts} if parts.get(name) != mine.get(name)]
        if names:
            return f"the {recorded.stage} stage gave rank {rank} other {', '.join(names)}{_first(samples, work)}"
    return ""


def _first(samples: Sequence[int], work: Work) -> str:
    """Name the first sample that counts otherwise, with what it counts in the replay."""
    mine = work.sample_digests()
    if len(samples) != len(mine):
        return f": {len(samples)} samples in the log, {len(mine)} in the replay"
    for (key, digest), recorded in zip(mine.items(), samples, strict=True):
        if digest != recorded:
            sample = work.samples[key]
            scale = "" if sample.scale is None else f", scale {sample.scale!r}"
            counts = f"advantage {sample.advantage!r}{scale}"
            counts += f", {sample.withheld} tokens withheld, {sample.prompt_tokens} of the prompt"
            counts += f", {sample.generated} generated" if sample.generated else ""
            return f", first of {key}; in the replay it has {counts}"
    return ""
