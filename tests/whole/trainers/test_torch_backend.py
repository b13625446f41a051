"""The PyTorch backend: the optimizer against torch's own, refused gradients, and generator parity."""

import copy
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.configs import load_config
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.model.causal_lm import build_model, token_logprobs
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend

SMALL = load_config("default", {"model": {"hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 24}}).model
Make = Callable[..., TorchBackend]


@pytest.mark.parametrize("max_grad_norm", [0.01, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_is_torchs_own_clipping_and_adamw(
    causal_mean: Any, make_backend: Make, max_grad_norm: float, weight_decay: float
) -> None:
    """Three steps, clipped and not, with and without decay, against clip_grad_norm_ and torch.optim.AdamW."""
    reference = copy.deepcopy(causal_mean)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.03, betas=(0.8, 0.9), weight_decay=weight_decay)
    backend = make_backend(causal_mean, betas=(0.8, 0.9), weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    ids = torch.tensor([2, 5, 7, 3, 1])
    for _ in range(3):
        logits = reference(input_ids=ids[None], attention_mask=None, use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[1:-1], ids[2:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm))
        optimizer.step()
        assert backend.accumulate_supervised([ids], [2], 3) == pytest.approx(float(loss.detach()), abs=1e-12)
        assert backend.apply(backend.gradients(), learning_rate=0.03) == pytest.approx(norm, rel=1e-12)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(backend.state()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(causal_mean: Any, make_backend: Make, bad: float) -> None:
    """Invariant 10: weights and moments stay; the next good step is as if it had not been."""
    twin = make_backend(copy.deepcopy(causal_mean))
    backend = make_backend(causal_mean)
    good = torch.linspace(-1, 1, backend.gradients().numel(), dtype=torch.float64)
    poisoned = good.clone()
    poisoned[7] = bad
    for one in (backend, twin):
        one.apply(good, learning_rate=0.01)
    before = {name: value.clone() for name, value in backend.state().items()}
    with pytest.raises(FloatingPointError, match="left as they are"):
        backend.apply(poisoned, learning_rate=0.01)
    assert all(torch.equal(backend.state()[name], value) for name, value in before.items())
    for one in (backend, twin):
        one.apply(good, learning_rate=0.01)
    assert all(torch.equal(twin.state()[name], value) for name, value in backend.state().items())


def test_gradients_are_handed_over_once(causal_mean: Any, make_backend: Make) -> None:
    backend = make_backend(causal_mean)
    backend.accumulate_supervised([torch.tensor([1, 2, 3])], [1], 2)
    assert float(backend.gradients().abs().max()) > 0
    assert float(backend.gradients().abs().max()) == 0


def test_a_filler_runs_and_adds_nothing(causal_mean: Any, make_backend: Make) -> None:
    """It goes through the model, so that collectives stay in step, even with a poisoned row."""
    calls: list[int] = []
    causal_mean.register_forward_hook(lambda *_: calls.append(1))
    rows = Rows([torch.tensor([1, 2, 3])], [torch.tensor([float("-inf"), -1.0])], [1], [5.0], [0], filler=True)
    backend = make_backend(causal_mean)
    sums = backend.accumulate(rows, 10).read()
    assert (sums.loss, sums.ratio, sums.clipped, sums.kl, sums.tokens) == (0, 0, 0, 0, 0)
    assert float(backend.gradients().abs().max()) == 0
    assert calls == [1]


def test_log_probabilities_are_of_the_tempered_distribution() -> None:
    """CASE-G4: logits [1, 0], T = 0.5, token 0: -0.1269, where T = 1 gives -0.3133."""
    logits, token = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert float(token_logprobs(logits, token, 0.5)) == pytest.approx(-0.1269, abs=1e-4)
    assert float(token_logprobs(logits, token, 1.0)) == pytest.approx(-0.3133, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_trainer_agrees_with_the_generator_on_every_token(make_backend: Make, temperature: float) -> None:
    """CASE-G4, shift by one: prompts of unequal lengths, left-padded for decoding and right-padded for training."""
    model = build_model(SMALL, vocab_size=32, seed=1)
    generator = TorchGenerator(model, eos_id=1, pad_id=0, decode_samples=64, alone=False, blocking=in_place)
    prompts = [(5,), (7, 8, 9, 10, 11), (3, 4), (12, 13, 14)]
    found: dict[int, list[Completion]] = {}

    async def main() -> None:
        async def one(i: int) -> None:
            request = GroupRequest(prompts[i], tuple(range(10 * i, 10 * i + 6)), 7, temperature)
            found[i] = list(await generator.generate(request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            async with anyio.create_task_group() as requests:
                for i in range(len(prompts)):
                    requests.start_soon(one, i)
            tasks.cancel_scope.cancel()

    run_virtual(main)
    samples = [(prompts[i], completion) for i in range(len(prompts)) for completion in found[i]]
    assert len({len(completion.token_ids) for _, completion in samples}) > 1
    rows = Rows(
        [torch.tensor([*prompt, *completion.token_ids], dtype=torch.int32) for prompt, completion in samples],
        [torch.tensor(completion.logprobs) for _, completion in samples],
        [len(prompt) for prompt, _ in samples],
        [1.0] * len(samples),
        [0] * len(samples),
        filler=False,
    )
    # One sample at a time, so that errors of both signs cannot cancel over a batch: KL's k3 is gap² / 2.
    for i in range(len(samples)):
        row = Rows([rows.tokens[i]], [rows.logprobs[i]], [rows.prompt_tokens[i]], [1.0], [0], filler=False)
        alone = make_backend(model, temperature=temperature).accumulate(row, 1).read()
        assert alone.ratio / alone.tokens == pytest.approx(1.0, abs=1e-5)
    sums = make_backend(model, temperature=temperature).accumulate(rows, 1).read()
    assert sums.tokens == sum(len(completion.token_ids) for _, completion in samples)
    assert sums.ratio / sums.tokens == pytest.approx(1.0, abs=1e-5)
    assert sums.kl / sums.tokens == pytest.approx(0.0, abs=1e-6)
    assert sums.clipped == 0
