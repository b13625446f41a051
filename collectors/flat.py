"""From a group's completions and outcomes to what the data plane takes: tags, and columns of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncrl.collectors.extras import extra_columns
from asyncrl.collectors.generators.base import Completion
from asyncrl.collectors.outcome import Outcome, SampleFailure, StandIn
from asyncrl.collectors.tasks import Reward
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.records import Grant, GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.columns import LOGPROBS, ROUTED_EXPERTS, TOKENS
from asyncrl.engine.records.generated import GENERATED, write_generated
from asyncrl.engine.records.group import check_tags
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.spans import SPANS, write_spans
from asyncrl.filters.taggers import Tagger

Columns = dict[str, list[torch.Tensor]]
BAD_EXPERTS = "bad_experts"
"""Why a group fails whose chosen experts do not fit its tokens."""


class GroupFailed(AsyncRLError, RuntimeError):
    """A group failed, for a named reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def flatten(
    grant: Grant,
    version: int,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    outcomes: Sequence[Outcome],
    taggers: Mapping[str, Tagger],
) -> tuple[GroupMeta, Columns]:
    """Return tags and columns of a group with at least one reward; `version` was served when it was dispatched."""
    prompt_ids = next((c.prompt_ids for c in completions if c.prompt_ids is not None), prompt_ids)
    # A failed sample keeps its place and its key, and gets an empty response, so that it cannot be trained.
    kept = [
        c if isinstance(outcome, Reward) else Completion((), (), (), False)
        for c, outcome in zip(completions, outcomes, strict=True)
    ]
    lengths = [len(completion.token_ids) for completion in kept]
    oldest = min((span[0] for c in kept for span in c.spans), default=version)
    newest = max((span[0] for c in kept for span in c.spans), default=version)
    stamped = min(version, oldest)
    keys = sample_keys(stamped, grant.group, grant.size)
    tags = {
        tag.GROUP: grant.group,
        tag.PROMPT: grant.prompt.id,
        tag.DATASET: grant.prompt.dataset,
        tag.VERSION: stamped,
        tag.END_VERSION: newest,
        tag.PROMPT_TOKENS: len(prompt_ids),
        tag.RESPONSE_TOKENS: lengths,
        tag.TRAINABLE_TOKENS: [len(completion.sampled_ids) for completion in kept],
        tag.REWARD: [o.value if isinstance(o, Reward) else None for o in outcomes],
        tag.STATUS: [_status(c, o) for c, o in zip(completions, outcomes, strict=True)],
        tag.CAUSE: [o.cause if isinstance(o, SampleFailure | StandIn) else None for o in outcomes],
        tag.DISTINCT_RESPONSES: len({tuple(completion.token_ids) for completion in completions}),
        **_parts(outcomes),
        **{name: _tagged(name, tagger, kept, keys[0]) for name, tagger in taggers.items()},
    }
    # Tokens may all be newer than the stamp: their group waited for its turn, or began anew, while versions passed by.
    if any(span[0] != stamped for completion in kept for span in completion.spans):
        tags[SPANS] = [write_spans(completion.spans) for completion in kept]
    if any(len(completion.sampled_ids) < len(completion.token_ids) for completion in kept):
        tags[GENERATED] = [write_generated(c.generated or ((0, len(c.token_ids)),)) for c in kept]
    columns = {
        TOKENS: [torch.tensor([*prompt_ids, *c.token_ids], dtype=torch.int32) for c in kept],
        LOGPROBS: [torch.tensor(c.logprobs, dtype=torch.float32) for c in kept],
        **extra_columns(outcomes),
        **_experts(kept, len(prompt_ids)),
    }
    return GroupMeta(keys, tags), columns


def _experts(completions: Sequence[Completion], prompt_tokens: int) -> Columns:
    """Return the column of chosen experts, if the engine records them; GroupFailed if a sample's rows do not fit."""
    found = [completion.experts for completion in completions if completion.experts is not None]
    if not found:
        return {}
    empty = found[0][:0]
    rows = [empty if completion.experts is None else completion.experts for completion in completions]
    for completion, experts in zip(completions, rows, strict=True):
        tokens = prompt_tokens + len(completion.token_ids)
        if completion.token_ids and (len(experts) != tokens or experts.shape[1:] != empty.shape[1:]):
            raise GroupFailed(BAD_EXPERTS, f"the chosen experts of {tokens} tokens have the shape {experts.shape}")
    return {ROUTED_EXPERTS: [torch.from_numpy(experts) for experts in rows]}


def _status(completion: Completion, outcome: Outcome) -> str:
    if not isinstance(outcome, Reward):
        return tag.FAILED
    return tag.FINISHED if completion.finished else tag.TRUNCATED


def _tagged(name: str, tagger: Tagger, completions: Sequence[Completion], key: str) -> list[Any]:
    """Return a tag's values; the group fails, with the tag's name, if a tagger raises or a log cannot write its
    value."""
    try:
        values = [tagger(completion.sampled_ids) for completion in completions]
        check_tags({name: values}, key=key)
    except BaseException as error:  # The edge of user code.
        raise GroupFailed("tagger_error", f"the tagger of tag {name!r} failed: {error!r}") from error
    return values


def _parts(outcomes: Sequence[Outcome]) -> dict[str, list[float | None]]:
    """Return the named parts of rewards as tags per sample; None if a sample lacks one."""
    names = sorted({name for o in outcomes if isinstance(o, Reward) for name in o.parts})
    return {name: [o.parts.get(name) if isinstance(o, Reward) else None for o in outcomes] for name in names}
