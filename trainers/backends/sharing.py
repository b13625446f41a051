"""Samples of one prompt in one row, so that a forward pass computes the prompt once.

    p p p | a a a a | b b | c c c      one row: a prompt of 3 tokens, and responses of 4, 2 and 3
    0 1 2 | 3 4 5 6 | 3 4 | 3 4 5      positions

A token sees the prompt, and what stands before it in its own response. So the model says of each response what it says
of prompt and response alone, and gradients are the same (as in Prefix Grouper, arXiv:2506.05433). Sixteen samples of
128 + 8 tokens take 256 positions in place of 2,176.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from asyncrl.engine.model.causal_lm import rounding_limit
from asyncrl.engine.model.sketch import sketch_model, vocabulary
from asyncrl.trainers.backends.layout import runs
from asyncrl.trainers.backends.packing import has_windows

log = structlog.get_logger()

LARGEST_SHARE = 0.5
"""Prompts are shared where at most this part of the positions is left: attention with a mask takes longer per token."""
_PROMPT, _PADDING = 0, -1


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """A forward pass (G, L) with one row per prompt.

    `owners` (G, L): 0 in the prompt, k in the k-th response of the row, -1 in the padding. Of each sample, in the order
    that they were given, `prompt_ends` has the place of its prompt's last token, `starts` that of its response, and
    `counts` the response's tokens; places are counted row by row.
    """

    ids: torch.Tensor
    owners: torch.Tensor
    positions: torch.Tensor
    prompt_ends: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], *, pad_id: int) -> "SharedPrompts | None":
        """Lay out samples (L_i), the first `prompt_tokens` of which are prompts; None if that saves too little."""
        rows: dict[bytes, list[int]] = {}
        for index, (sample, prompt) in enumerate(zip(tokens, prompt_tokens, strict=True)):
            rows.setdefault(sample[:prompt].numpy().tobytes(), []).append(index)
        counts = torch.tensor([len(sample) - prompt for sample, prompt in zip(tokens, prompt_tokens, strict=True)])
        prompts = torch.tensor(prompt_tokens)
        members = list(rows.values())
        length = max(prompt_tokens[row[0]] + int(counts[row].sum()) for row in members)
        if length * len(members) > LARGEST_SHARE * len(tokens) * int((prompts + counts).max()):
            return None
        ids = torch.full((len(members), length), pad_id)
        owners = torch.full((len(members), length), _PADDING)
        positions = torch.zeros(len(members), length, dtype=torch.int64)
        starts, ends = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(len(tokens), dtype=torch.int64)
        for row, samples in enumerate(members):
            prompt, sizes = prompt_tokens[samples[0]], counts[samples]
            used = prompt + int(sizes.sum())
            numbers = torch.arange(1, len(samples) + 1)
            ids[row, :used] = torch.cat([tokens[samples[0]][:prompt], *(tokens[i][prompt:] for i in samples)]).long()
            owners[row, :prompt], owners[row, prompt:used] = _PROMPT, torch.repeat_interleave(numbers, sizes)
            positions[row, :prompt] = torch.arange(prompt)
            positions[row, prompt:used] = runs(torch.full_like(sizes, prompt), sizes)
            starts[samples] = row * length + prompt + sizes.cumsum(0) - sizes
            ends[samples] = row * length + prompt - 1
        return cls(ids, owners, positions, ends, starts, counts)

    def predictors(self, prompt_tokens: Sequence[int]) -> torch.Tensor:
        """Return the places whose outputs predict the responses, sample by sample (tokens of all responses).

        The output at a prompt's last token predicts the first token of each of its responses.
        """
        places = runs(self.starts - 1, self.counts)
        first = (self.counts.cumsum(0) - self.counts)[self.counts > 0]
        places[first] = self.prompt_ends[self.counts > 0]
        return places

    def predicted(self, prompt_tokens: Sequence[int]) -> torch.Tensor:
        """Return the responses' ids, sample by sample (tokens of all responses)."""
        return self.ids.flatten()[runs(self.starts, self.counts)]

    def responses(self, prompt_tokens: Sequence[int]) -> list[int]:
        """Return how many tokens each response has."""
        return self.counts.tolist()

    def arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return what a transformers model takes beside the ids: positions (G, L), and a mask (G, 1, L, L)."""
        owners, positions = torch.stack([self.owners, self.positions]).to(device)
        sees = (owners.unsqueeze(1) == _PROMPT) | (owners.unsqueeze(1) == owners.unsqueeze(2))
        # A place of the padding sees the padding before it: a softmax over nothing would be NaN.
        mask = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill(~sees.tril(), torch.finfo(dtype).min)
        return {"position_ids": positions, "attention_mask": mask.unsqueeze(1)}


def can_share(model: Any) -> bool:
    """Return whether a model says of responses that share their prompt what it says of each alone, by trying it.

    Windows and ALiBi count the responses between; states of recurrent layers, and short convolutions, mix them. A small
    model of the same architecture is tried too: in one whose weights are as initialized, layers hardly matter.
    """
    config = getattr(model, "config", None)
    if config is None or has_windows(model):
        return False
    sketch = sketch_model(config)
    return sketch is not None and _keeps_apart(sketch) and _keeps_apart(model)


def _keeps_apart(model: Any) -> bool:
    try:
        gap, limit = _gap(model)
    except Exception as error:  # The model's code may raise anything for a mask that it was not written for.
        log.info("prompts are not shared: the model does not run so", model=type(model).__name__, error=repr(error))
        return False
    if not gap <= limit:
        log.info("prompts are not shared: the model would mix samples", model=type(model).__name__, gap=gap)
    return gap <= limit


@torch.no_grad()
def _gap(model: Any) -> tuple[float, float]:
    """Return by how much the logits of three short responses differ, and by how much they may, in nats."""
    weight = next(model.parameters())
    random, prompt = torch.Generator().manual_seed(0), 12
    drawn = torch.randint(vocabulary(model), (prompt + 9,), generator=random)
    tokens = [torch.cat([drawn[:prompt], part]) for part in torch.split(drawn[prompt:], [4, 2, 3])]
    shared = SharedPrompts.of(tokens, [prompt] * 3, pad_id=0)
    assert shared is not None
    # Not `model(…)`: whoever watches it by a hook is to see what is trained.
    arguments = shared.arguments(weight.device, weight.dtype)
    found = model.forward(input_ids=shared.ids.to(weight.device), use_cache=False, **arguments).logits
    together = found.flatten(0, 1)[shared.predictors([prompt] * 3).to(weight.device)]
    rows = [one[None].to(weight.device) for one in tokens]
    alone = [model.forward(input_ids=row, use_cache=False).logits[0, prompt - 1 : -1] for row in rows]
    gap = (together.float().log_softmax(-1) - torch.cat(alone).float().log_softmax(-1)).abs().mean()
    return float(gap), rounding_limit(weight.dtype)
