"""How many samples are made, how old they may get, and how tokens are drawn."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import Count, Groups, Seconds, Section, Versions, ZeroOrMore


class Rollout(Section):
    max_staleness: Versions
    """Largest age, in versions, of any token that is trained on; 0 is synchronous training."""
    max_publish_lag: Versions | None
    """No step starts while generators are more than this many versions behind the trainer; null:
    min(1, max_staleness)."""
    stale_mode: Literal["drop", "gate", "tokens"]
    """What happens to groups that get too old. `drop`: groups over the bound are dropped, which hits long answers
    first. `gate`: a batch waits until all groups that it leaves behind can still be trained in time; there is no
    length bias, and the trainer waits. `tokens`: only tokens within the bound are trained, and all rewards count;
    needs a generator that swaps weights within a response and reports spans."""
    gate_timeout_s: Seconds
    """Longest wait of one batch in mode `gate`; after it the batch goes on, and groups that come later are dropped."""
    pacing: bool
    """Hold dispatches back while a whole batch is waiting, so that less is generated too early."""
    cancel_stale: bool
    """Cancel groups in flight that are too old for any later batch; saves compute and adds to length bias."""
    requeue_tries: ZeroOrMore
    """How often a prompt whose group was lost to age is dispatched again, before other prompts; 0: never."""
    bias_warning: Annotated[float, Field(ge=0, le=1)]
    """Warn when the mean length of the samples that age lets through is less than this times the mean length
    generated."""
    groups_per_step: Groups
    """Groups per training batch."""
    group_size: Annotated[int, Field(ge=2, le=100_000)]
    """Samples per prompt."""
    oversample: Annotated[int, Field(ge=0, le=100_000)]
    """So many samples more are begun per group; once `group_size` of them have ended, the others are aborted. Nobody
    waits for a group's longest answers then, and they are never trained on: lengths are biased towards short answers,
    and `bias_warning` does not see it. Not at `max_staleness` 0: which answers end first is a matter of time."""
    min_live: Annotated[int, Field(ge=2, le=100_000)]
    """Drop a group with fewer live samples than this; a live sample has a finite reward and a token to train."""
    temperature: Annotated[float, Field(gt=0, le=1e3)]
    """Sampling temperature; log-probabilities are those of the distribution at this temperature."""
    max_new_tokens: Count
    """Longest response, in tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Sample from the smallest set of tokens that have this probability; 1: from all. Below 1 the sampler's
    distribution is another one than the trainer's, and ratios at age 0 are off 1."""
    top_k: ZeroOrMore
    """Sample from so many tokens, the likeliest; 0: from all. As for `top_p`."""
    min_p: Annotated[float, Field(ge=0, le=1)]
    """Leave out tokens less likely than this share of the likeliest one; 0: none. As for `top_p`."""
    stop_strings: list[Annotated[str, Field(min_length=1, max_length=1000)]]
    """Texts that end a response; the token that completes one is its last."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    """More tokens that end a response, besides those of the tokenizer and of the checkpoint's generation_config."""
    add_bos: bool | None
    """Whether a prompt begins with the tokenizer's BOS token; null: as the checkpoint's tokenizer does it."""
