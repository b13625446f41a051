"""Decoding with a cache against the whole sequence, and what ends a response."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
import transformers

from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.generators.cached import check_cached
from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import ConfigError, GenerationError
from asyncrl.engine.model.sketch import sketch_model

SHAPE: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mistral", {**HEADS, "sliding_window": 4}),
        ("Lfm2", {**HEADS, "layer_types": ["conv", "full_attention"]}),
        ("Bloom", {"n_layer": 2, "n_head": 4}),
    ],
)
def test_tokens_decoded_with_a_cache_have_the_log_probabilities_of_the_whole(
    kind: str, changes: dict[str, Any]
) -> None:
    check_cached(sketch_model(getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})), pad_id=0)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mamba", {"state_size": 8}, r"MambaForCausalLM \(its layers: linear_attention\) gives tokens .* cannot be"),
        ("Rwkv", {"attention_hidden_size": 32}, r"RwkvForCausalLM \(its layers: RwkvBlock\) .* cannot be trained"),
    ],
)
def test_a_model_that_keeps_its_state_otherwise_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    """FOUND-L1, FOUND-I13: pure state-space and recurrent models, whose sampled log-probabilities would be others."""
    model = sketch_model(getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes}))
    with pytest.raises(ConfigError, match=message):
        check_cached(model, pad_id=0)


def test_any_of_several_end_tokens_ends_a_response(fixed_logits: Callable[[list[float]], Any]) -> None:
    """FOUND-L8: of four equally likely tokens two are ends; whichever comes stays, and nothing after it."""
    generator = TorchGenerator(
        fixed_logits([0.0] * 4), eos_id=1, stop_ids=[3], pad_id=0, decode_samples=64, alone=False, blocking=in_place
    )
    ended = generator.decode([GroupRequest((2,), tuple(range(64)), 40, 1.0)])[0]
    assert {completion.token_ids[-1] for completion in ended} == {1, 3}
    assert all(completion.finished and not {1, 3} & {*completion.token_ids[:-1]} for completion in ended)


def test_a_prompt_too_long_for_the_model_fails_alone(fixed_logits: Callable[[list[float]], Any]) -> None:
    """FOUND-I15: one that needs all positions is served, one that needs more is refused with the numbers."""
    generator = TorchGenerator(
        fixed_logits([0.0] * 4), eos_id=1, pad_id=0, decode_samples=4, alone=False, blocking=in_place, positions=8
    )

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            assert len(await generator.generate(GroupRequest((2,) * 5, (1, 2), 3, 1.0))) == 2
            with pytest.raises(GenerationError, match="6 tokens and 3 new ones need 9 positions; the model has 8"):
                await generator.generate(GroupRequest((2,) * 6, (1, 2), 3, 1.0))
            tasks.cancel_scope.cancel()

    run_virtual(main)
