"""Samples of one prompt in one row: places, and log-probabilities and gradients against each sample alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

from asyncrl.engine.model.sketch import sketch_model
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.sharing import SharedPrompts, can_share
from asyncrl.trainers.backends.torch_backend import TorchBackend

SHAPE: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
Make = Callable[..., TorchBackend]


def model_of(kind: str, **changes: Any) -> Any:
    model = sketch_model(getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes}))
    assert model is not None
    return model.double()


def samples(*prompts: tuple[int, Sequence[int]]) -> tuple[list[torch.Tensor], list[int]]:
    """Return samples, prompt by prompt: (tokens of the prompt, tokens of its responses)."""
    random = torch.Generator().manual_seed(3)
    tokens, sizes = [], []
    for prompt, responses in prompts:
        ids = torch.randint(2, 29, (prompt,), generator=random, dtype=torch.int32)
        for response in responses:
            tokens.append(torch.cat([ids, torch.randint(2, 29, (response,), generator=random, dtype=torch.int32)]))
            sizes.append(prompt)
    return tokens, sizes


def rows_of(tokens: Sequence[torch.Tensor], prompts: Sequence[int], **changes: Any) -> Rows:
    counts = [len(one) - prompt for one, prompt in zip(tokens, prompts, strict=True)]
    return Rows(
        **{
            "tokens": tokens,
            "logprobs": [torch.full((count,), -3.0, dtype=torch.float64) for count in counts],
            "prompt_tokens": prompts,
            "advantages": [(-1.0) ** i * (1 + i) for i in range(len(tokens))],
            "withheld": [i % 2 for i in range(len(tokens))],
            "filler": False,
            **changes,
        }
    )


def shuffled(given: tuple[list[torch.Tensor], list[int]]) -> tuple[list[torch.Tensor], list[int]]:
    """Return samples of different prompts between one another."""
    order = torch.randperm(len(given[0]), generator=torch.Generator().manual_seed(1)).tolist()
    return [given[0][i] for i in order], [given[1][i] for i in order]


def watched(model: Any) -> list[torch.Size]:
    """Return a list that grows by the shape of the ids of each forward pass."""
    passes: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _m, _a, given: passes.append(given["input_ids"].shape), with_kwargs=True)
    return passes


def test_a_prompt_stands_once_before_its_responses() -> None:
    one, two = [5, 6, 7, 9], [8, 9]
    tokens = [torch.tensor(ids) for ids in ([*one, 1, 2], [*two, 3], [*one, 4])]
    assert SharedPrompts.of(tokens, [4, 2, 4], pad_id=0) is None, "two of three rows are left: too little is saved"
    tokens = [*tokens, torch.tensor(one), torch.tensor([*one, 3]), torch.tensor([*one, 2])]
    found = SharedPrompts.of(tokens, [4, 2, 4, 4, 4, 4], pad_id=0)
    assert found is not None
    assert found.ids.tolist() == [[5, 6, 7, 9, 1, 2, 4, 3, 2], [8, 9, 3, 0, 0, 0, 0, 0, 0]]
    assert found.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 4, 4]
    assert found.owners.tolist() == [[0, 0, 0, 0, 1, 1, 2, 4, 5], [0, 0, 1, -1, -1, -1, -1, -1, -1]]
    assert found.predictors([]).tolist() == [3, 4, 10, 3, 3, 3]
    assert found.predicted([]).tolist() == [1, 2, 3, 4, 3, 2]
    assert found.responses([]) == [2, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "GPT2", "Phi"])
def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(kind: str, make_backend: Any) -> None:
    tokens, prompts = shuffled(samples((11, [3, 1, 4, 2, 2]), (9, [2, 5, 1, 1]), (10, [3, 3, 2])))
    found = {}
    for shared in (True, False):
        torch.manual_seed(0)
        model = model_of(kind)
        backend = make_backend(model, share_prompts=shared)
        passes: list[torch.Size] = []
        model.register_forward_pre_hook(
            lambda _m, _a, given, seen=passes: seen.append(given["input_ids"].shape), with_kwargs=True
        )
        logprobs = backend.logprobs(rows_of(tokens, prompts))
        sums = backend.accumulate(rows_of(tokens, prompts), 20).read()
        assert passes == [((3, 23) if shared else (12, 15))] * 2
        found[shared] = (torch.cat(logprobs), backend.gradients(), sums)
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-11)
    # Gradients pass through norms that compute in float32: of a prompt once, or of each sample and then added up.
    noise = 1e-11 if kind in ("GPT2", "Phi") else 1e-6
    torch.testing.assert_close(found[True][1], found[False][1], rtol=0, atol=noise)
    assert found[True][2].tokens == found[False][2].tokens
    assert found[True][2].loss == pytest.approx(found[False][2].loss, abs=1e-12)


def initialized(kind: str, **sizes: Any) -> Any:
    """Return a model as it is before any training, when its layers hardly matter."""
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**{**SHAPE, **sizes}))


def test_models_whose_layers_would_mix_the_responses_do_not_share() -> None:
    assert can_share(initialized("Llama"))
    assert not can_share(initialized("Mistral", sliding_window=4)), "a window counts the responses between"
    assert not can_share(initialized("Mpt", d_model=16, n_heads=2, n_layers=2)), "so does ALiBi"
    assert not can_share(initialized("Lfm2", layer_types=["conv", "full_attention"])), "a short convolution mixes them"
    assert not can_share(initialized("Mamba2", num_heads=2, head_dim=16, n_groups=1, state_size=4)), "and so do states"


def test_samples_with_more_than_ids_and_passes_of_one_length_do_not_share(make_backend: Any) -> None:
    model = model_of("Llama")
    tokens, prompts = samples((11, [3, 1, 4, 2]))
    backend = make_backend(model, share_prompts=True)
    passes = watched(model)
    backend.logprobs(rows_of(tokens, prompts))
    backend.logprobs(rows_of(tokens, prompts, pad_to=16))
    assert passes == [(1, 21), (4, 16)]
