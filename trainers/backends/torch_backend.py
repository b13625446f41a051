"""Training in PyTorch: a whole replica a rank, AdamW, padded micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.engine.data_plane.codec import pad_rows
from asyncrl.engine.model.causal_lm import token_logprobs
from asyncrl.engine.weights.base import State
from asyncrl.trainers.backends.base import Rows, StepSums
from asyncrl.trainers.objective import Clip, policy_loss_sums


class TorchBackend:
    """`temperature` is the sampling temperature, so that the ratio of an unchanged policy is 1."""

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        temperature: float,
        clip: Clip,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        packed: bool = False,
    ) -> None:
        self._model = model
        self._pad_id = pad_id
        self._temperature = temperature
        self._clip = clip
        self._betas = betas
        self._weight_decay = weight_decay
        self._max_grad_norm = max_grad_norm
        self._packed = packed
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=0.0, betas=self._betas, weight_decay=self._weight_decay
        )

    def accumulate(self, rows: Rows, total_tokens: int) -> StepSums:
        logprobs = self._logprobs(rows.tokens)
        behaviour = torch.zeros_like(logprobs)
        advantages = torch.zeros_like(logprobs)
        mask = torch.zeros_like(logprobs, dtype=torch.bool)
        for i, (prompt, sampled) in enumerate(zip(rows.prompt_tokens, rows.logprobs, strict=True)):
            # The output at prompt - 1 predicts the first response token.
            at = slice(prompt - 1, prompt - 1 + sampled.shape[0])
            behaviour[i, at] = sampled.to(behaviour.dtype)
            advantages[i, at] = rows.advantages[i]
            mask[i, at.start + rows.withheld[i] : at.stop] = not rows.filler
        sums = policy_loss_sums(logprobs, behaviour, advantages, mask, self._clip)
        loss = sums.loss / max(total_tokens, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        return StepSums(
            loss=float(loss.detach()),
            ratio=float(sums.ratio),
            clipped=int(sums.clipped),
            kl=float(sums.kl),
            tokens=int(sums.tokens),
        )

    @torch.inference_mode()
    def log_ratios(self, rows: Rows) -> list[torch.Tensor]:
        logprobs = self._logprobs(rows.tokens)
        return [
            logprobs[i, prompt - 1 : prompt - 1 + sampled.shape[0]][skip:] - sampled[skip:].to(logprobs.dtype)
            for i, (prompt, sampled, skip) in enumerate(
                zip(rows.prompt_tokens, rows.logprobs, rows.withheld, strict=True)
            )
        ]

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        logprobs = self._logprobs(tokens)
        mask = torch.zeros_like(logprobs, dtype=torch.bool)
        for i, (row, prompt) in enumerate(zip(tokens, prompt_tokens, strict=True)):
            mask[i, prompt - 1 : row.shape[0] - 1] = True
        loss = -torch.where(mask, logprobs, 0.0).sum() / max(total, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def gradients(self) -> torch.Tensor:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._parameters])
        self._optimizer.zero_grad(set_to_none=True)
        return flat

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        norm = float(torch.linalg.vector_norm(gradients, dtype=torch.float64))
        if not torch.isfinite(torch.tensor(norm)):
            raise FloatingPointError(f"the gradient's norm is {norm}; the weights were left as they are")
        scale = min(1.0, self._max_grad_norm / (norm + 1e-6))
        at = 0
        for parameter in self._parameters:
            part = gradients[at : at + parameter.numel()]
            parameter.grad = (part * scale).reshape(parameter.shape)
            at += parameter.numel()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> State:
        state: State = self._model.state_dict()
        return state

    def _logprobs(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return log-probabilities (B, L - 1): at t, of the token at t + 1 given those up to t."""
        if self._packed:
            return pad_rows(self._packed_logprobs(tokens))
        ids = pad_rows([row.long() for row in tokens], self._pad_id)
        lengths = torch.tensor([row.shape[0] for row in tokens])
        attention = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()
        logits = self._model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        return token_logprobs(logits[:, :-1], ids[:, 1:], self._temperature)

    def _packed_logprobs(self, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run all samples as one row of T tokens; return log-probabilities of each, (L_i - 1).

        Positions start anew in each sample, and a token attends to earlier ones of its own sample
        alone. No token is predicted from another sample.
        """
        lengths = torch.tensor([row.shape[0] for row in tokens])
        ids = torch.cat([row.long() for row in tokens]).unsqueeze(0)
        positions = torch.cat([torch.arange(int(n)) for n in lengths]).unsqueeze(0)
        sample = torch.repeat_interleave(torch.arange(len(tokens)), lengths)
        attends = (sample.unsqueeze(1) == sample.unsqueeze(0)).tril()
        dtype = next(iter(self._parameters)).dtype
        mask = torch.zeros(attends.shape, dtype=dtype).masked_fill(~attends, torch.finfo(dtype).min)
        logits = self._model(
            input_ids=ids, attention_mask=mask[None, None], position_ids=positions, use_cache=False
        ).logits[0]
        parts = zip(torch.split(logits, lengths.tolist()), tokens, strict=True)
        return [token_logprobs(part[:-1], row.long()[1:], self._temperature) for part, row in parts]
