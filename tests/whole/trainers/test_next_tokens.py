"""Scores from a body and a head in chunks, against whole logits in float64; which models' heads cannot run so."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.model.sketch import sketch_model
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.chosen import chosen_scores
from asyncrl.trainers.backends.next_tokens import is_lean
from asyncrl.trainers.backends.torch_backend import TorchBackend

SHAPE: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma": ("Gemma2", {"final_logit_softcapping": 0.7, "sliding_window": 4}),
    "scaled": ("Cohere", {"logit_scale": 0.3}),
    "divided": ("Granite", {"logits_scaling": 3.0}),
    "learned": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
}
# What compute in float32, whatever the weights are in: Gemma's attention and Cohere's norms.
NOISE = {"gemma": 1e-6, "scaled": 1e-8}
LENGTHS, PROMPTS, WITHHELD = [7, 3, 11, 5], [2, 1, 4, 3], [0, 1, 3, 0]
Make = Callable[..., TorchBackend]


class CappedLlama(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Caps its logits as Gemma does, and is in float64 throughout."""

    def forward(self, **arguments: Any) -> Any:
        output = super().forward(**arguments)
        output.logits = 0.7 * torch.tanh(output.logits / 0.7)
        return output


def sketch(kind: str) -> Any:
    if kind == "capped":
        torch.manual_seed(0)
        return CappedLlama(transformers.LlamaConfig(**SHAPE, final_logit_softcapping=0.7)).double().eval()
    name, changes = KINDS[kind]
    model = sketch_model(getattr(transformers, f"{name}Config")(**{**SHAPE, **changes}))
    assert model is not None
    return model.double()


def rows_of(**changes: Any) -> Rows:
    random = torch.Generator().manual_seed(2)
    responses = [length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    return Rows(
        **{
            "tokens": [torch.randint(2, 29, (length,), generator=random, dtype=torch.int32) for length in LENGTHS],
            "logprobs": [torch.full((count,), -3.0, dtype=torch.float64) for count in responses],
            "prompt_tokens": PROMPTS,
            "advantages": [1.0, -0.5, 0.7, -2.0],
            "withheld": WITHHELD,
            "filler": False,
            **changes,
        }
    )


def tables(model: Any, rows: Rows, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of every token after each position of the responses: whole logits, one sample at a time."""
    out = []
    for ids, prompt in zip(rows.tokens, rows.prompt_tokens, strict=True):
        logits = model(input_ids=ids.long()[None], use_cache=False).logits[0]
        out.append(torch.log_softmax(logits / temperature, -1)[prompt - 1 : -1])
    return out


def expected(model: Any, rows: Rows, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and entropy, summed over the trained tokens, in plain formulas; and all log-probabilities of responses."""
    loss, entropy, found = torch.zeros(()).double(), torch.zeros(()).double(), []
    for i, table in enumerate(tables(model, rows, temperature)):
        answer = rows.tokens[i][rows.prompt_tokens[i] :].long()
        logprobs = table[torch.arange(len(answer)), answer]
        found.append(logprobs)
        advantage = rows.advantages[i]
        ratio = (logprobs - rows.logprobs[i]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        gain = gain.clamp(min=3 * advantage) if advantage < 0 else gain
        loss = loss - gain[rows.withheld[i] :].sum()
        entropy = entropy - (table.exp() * table)[rows.withheld[i] :].sum()
    return loss, entropy, torch.cat(found)


def flat_gradient(model: Any) -> torch.Tensor:
    return torch.cat(
        [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in model.parameters()]
    )


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "capped"])
def test_losses_gradients_and_entropies_are_those_of_whole_logits(
    make_backend: Make, kind: str, packed: bool, chunk: int | None
) -> None:
    """To 1e-10 in float64 (where a model computes in it), at a temperature of 0.8, with withheld tokens."""
    model, rows = sketch(kind), rows_of()
    twin = copy.deepcopy(model)
    loss, entropy, logprobs = expected(twin, rows, 0.8)
    (loss / 20).backward()  # type: ignore[no-untyped-call]
    backend = make_backend(model, packed=packed, chunk=chunk, temperature=0.8)
    assert backend._lean
    sums, noise = backend.accumulate(rows, 20).read(), NOISE.get(kind, 1e-10)
    assert sums.loss == pytest.approx(float(loss.detach()) / 20, abs=noise)
    assert sums.entropy == pytest.approx(float(entropy.detach()), abs=10 * noise)
    assert sums.tokens == sum(LENGTHS) - sum(PROMPTS) - sum(WITHHELD)
    right = flat_gradient(twin)
    assert float(right.abs().max()) > 1e-2
    torch.testing.assert_close(backend.gradients(), right, rtol=0, atol=noise)
    torch.testing.assert_close(torch.cat(backend.logprobs(rows)), logprobs.detach(), rtol=0, atol=noise)


@pytest.mark.parametrize("packed", [False, True])
def test_supervised_steps_and_the_reference_take_the_same_way(make_backend: Make, packed: bool) -> None:
    """Capped logits; a reference that the policy has left, whose divergence has its gradient in the loss."""
    model, rows = sketch("capped"), rows_of()
    twin = copy.deepcopy(model)
    logprobs = expected(twin, rows, 1.0)[2]
    backend = make_backend(model, packed=packed, chunk=2, reference_kl=0.3)
    loss = backend.accumulate_supervised(rows.tokens, PROMPTS, 9)
    assert loss == pytest.approx(-float(logprobs.sum().detach()) / 9, abs=1e-10)
    (-logprobs.sum() / 9).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(backend.gradients(), flat_gradient(twin), rtol=0, atol=1e-10)
    backend.apply(torch.ones_like(flat_gradient(twin)), learning_rate=0.01)
    frozen = backend.logprobs(rows, reference=True)
    torch.testing.assert_close(torch.cat(frozen), logprobs.detach(), rtol=0, atol=1e-10)
    away = [there - here for there, here in zip(frozen, backend.logprobs(rows), strict=True)]
    k3 = sum(float((gap.exp() - 1 - gap)[skip:].sum()) for gap, skip in zip(away, WITHHELD, strict=True))
    sums = backend.accumulate(replace(rows, reference_logprobs=frozen), 20).read()
    assert sums.reference_kl == pytest.approx(k3, abs=1e-10)


def test_the_head_sees_only_positions_that_are_trained(make_backend: Make) -> None:
    """And one per row, for which the model insists: a prompt's logits would be most of the memory."""
    model, rows, seen = sketch("untied"), rows_of(), []
    backend = make_backend(model, chunk=4)
    model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out.numel() // 29))
    backend.accumulate(rows, 20)
    trained = sum(LENGTHS) - sum(PROMPTS) - sum(WITHHELD)
    # The second half runs again in the backward pass.
    assert seen[0] == len(LENGTHS)
    assert max(seen[1:]) == 4
    assert sum(seen[1:]) == 2 * trained


def test_chunks_are_computed_again_in_the_type_of_the_pass(make_backend: Make) -> None:
    """In bfloat16, of a model in float32: both passes of the head, and about the gradient of one chunk."""
    gradients, seen = [], set()
    for chunk in (None, 3):
        model = sketch("untied").float()
        backend = make_backend(model, chunk=chunk, compute_dtype=torch.bfloat16)
        model.lm_head.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
        backend.accumulate(rows_of(), 20)
        gradients.append(backend.gradients())
    assert seen == {torch.bfloat16}
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-2


class Biased(torch.nn.Module):
    """A model that does something of its own between its head and its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def get_decoder(self) -> Any:
        return self.model.get_decoder()

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(self, **arguments: Any) -> Any:
        logits = self.model(**arguments).logits
        return SimpleNamespace(logits=torch.where(logits > 50, 50 + (logits - 50) / 2, logits))


def test_logits_that_are_changed_after_the_head_are_taken_whole(make_backend: Make) -> None:
    """Also if the change is of large logits alone, as a cap's is."""
    rows = rows_of()
    assert is_lean(sketch("untied"))
    assert not is_lean(Biased(sketch("untied")))
    model = Biased(sketch("untied"))
    twin = copy.deepcopy(model)
    backend = make_backend(model, chunk=3)
    loss, entropy, _ = expected(twin, rows, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    sums = backend.accumulate(rows, 1).read()
    assert (sums.loss, sums.entropy) == pytest.approx((float(loss.detach()), float(entropy.detach())), abs=1e-10)
    torch.testing.assert_close(backend.gradients(), flat_gradient(twin), rtol=0, atol=1e-10)


def test_tokens_that_cannot_come_do_not_spoil_the_entropy() -> None:
    """Logits of minus infinity: two of three tokens are as likely as each other, so the entropy is log 2."""
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    scores = chosen_scores(lambda rows: rows, logits, torch.tensor([2]), temperature=1.0, chunk=1)
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert float(scores.entropies) == pytest.approx(0.6931471805599453, abs=1e-12)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-0.5, 0.0, 0.5]]


def test_a_chunks_gradient_is_the_derivative() -> None:
    """By finite differences, at a temperature, with chunks that do not divide the positions."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 3, dtype=torch.float64, generator=random).requires_grad_()
    matrix = torch.randn(4, 3, dtype=torch.float64, generator=random).requires_grad_()

    def scores(hidden: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor([0, 3, 1, 1, 2])
        return chosen_scores(lambda some: some @ matrix.T, hidden, tokens, temperature=0.6, chunk=2).logprobs

    assert torch.autograd.gradcheck(scores, (hidden, matrix))


def test_a_log_probability_too_few_is_refused(make_backend: Make) -> None:
    """Joined end to end, the values of all samples after it would be those of a neighbour."""
    rows = rows_of()
    short = [rows.logprobs[0][:-1], *rows.logprobs[1:]]
    with pytest.raises(AsyncRLError, match=r"behaviour of \[4, 2, 7, 2\] tokens, for responses of \[5, 2, 7, 2\]"):
        make_backend(sketch("untied")).accumulate(replace(rows, logprobs=short), 1)
