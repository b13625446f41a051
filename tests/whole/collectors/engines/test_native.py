"""What is the native engine's own: what it refuses, what it shares, and what a failure costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.collectors.engines.checks import check_decoding
from asyncrl.collectors.engines.decoder import Decoder
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.engines.staged import stage
from asyncrl.engine.errors import ConfigError, GenerationError, VersionError
from asyncrl.engine.testing.conformance.engine_contract import Stream
from asyncrl.engine.testing.conformance.engine_trials import VOCABULARY, native_engine, serving, tiny_model

POISON = 31


def request(name: str, prompt: Sequence[int] = (3, 4, 5), tokens: int = 12, **more: Any) -> Request:
    sampling = {key: more.pop(key) for key in list(more) if hasattr(Sampling(1), key)}
    return Request(name, tuple(prompt), Sampling(tokens, **sampling), **{"seed": len(name), **more})


def answers(engine: NativeEngine, *requests: Request) -> list[Result]:
    """Return the results of requests made at once."""
    streams = [Stream(engine, each) for each in requests]

    async def ask() -> None:
        async with serving(engine), anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(stream.result)

    anyio.run(ask)
    return [stream.results[0] for stream in streams]


def model_of(kind: str, **sizes: Any) -> Any:
    base = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **base, **sizes), dtype=torch.float32).eval()


def test_an_engine_that_runs_cannot_be_prepared_any_more() -> None:
    """Its own thread may be capturing a CUDA graph, and two captures at once fail each other."""
    engine = native_engine(tiny_model("llama", 0))

    async def prepare_late() -> None:
        async with serving(engine):
            await checkpoint()
            with pytest.raises(GenerationError, match=r"call prepare\(\) before run\(\)"):
                await engine.prepare()

    anyio.run(engine.prepare)
    anyio.run(prepare_late)


@pytest.mark.parametrize(("kind", "named"), [("rwkv", "RwkvForCausalLM keeps no keys"), ("bloom", "cannot run bloom")])
def test_a_model_without_a_cache_of_keys_and_values_is_refused(kind: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_decoding(model_of(kind))


def test_a_model_with_layers_other_than_attention_is_refused() -> None:
    layers = ["conv", "full_attention"]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    with pytest.raises(ConfigError, match=r"lfm2 has layers of conv; the native engine runs"):
        check_decoding(model_of("lfm2", layer_types=layers, **sizes))


def test_a_model_that_attends_otherwise_when_it_decodes_is_refused() -> None:
    sizes = {"head_dim": 8, "num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    # Its attention has a sink that is no key: the engine's knows nothing of it.
    with pytest.raises(ConfigError, match=r"gpt_oss.*off from those of the whole sequence"):
        check_decoding(model_of("gpt_oss", intermediate_size=64, sliding_window=4, **sizes))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request("r", prompt=()), "the prompt has no tokens"),
        (request("r", prompt=(3, VOCABULARY)), f"token {VOCABULARY} is not one of the model's {VOCABULARY}"),
        (request("r", prompt=(-1,)), "token -1"),
        (request("r", tokens=0), "max_new_tokens is 0"),
        (request("r", tokens=62), "need 65 positions; the engine has 64"),
        (request("r", top_p=0.0), "top_p 0.0"),
        (request("r", seed=-1), "the seed is -1"),
        (request("r", stop_ids=tuple(range(17))), "17 stop ids; the engine takes 16"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(bad: Request, why: str) -> None:
    (result,) = answers(native_engine(tiny_model("llama", 0)), bad)
    assert result.finish == "error"
    assert why in result.error


def test_a_samples_tokens_do_not_depend_on_who_decodes_beside_it() -> None:
    mine = request("mine", seed=5)
    others = [request(f"other{n}", prompt=range(2, 3 + n), tokens=5 + n, top_k=n % 3) for n in range(9)]
    (alone,) = answers(native_engine(tiny_model("llama", 0)), mine)
    beside = answers(native_engine(tiny_model("llama", 0), rows=3), *others[:5], mine, *others[5:])[5]
    assert beside.token_ids == alone.token_ids
    assert beside.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_greedy_takes_the_likeliest_token_whose_logprob_is_zero() -> None:
    model = tiny_model("llama", 0)
    (result,) = answers(native_engine(tiny_model("llama", 0)), request("r", temperature=0.0))
    ids = torch.tensor([[3, 4, 5, *result.token_ids]])
    assert model(ids).logits[0, 2:-1].argmax(-1).tolist() == list(result.token_ids)
    assert result.logprobs == (0.0,) * 12


def test_a_prompt_is_computed_once_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill = Decoder.fill

    def counted(decoder: Decoder, slots: Sequence[int], sequences: Sequence[Sequence[int]], **more: bool) -> None:
        filled.append(len(slots))
        fill(decoder, slots, sequences, **more)

    monkeypatch.setattr(Decoder, "fill", counted)
    engine = native_engine(tiny_model("llama", 0))
    filled.clear()
    group = [request(f"r{n}", tokens=3 + n, group="g", seed=n) for n in range(9)]
    shared = answers(engine, *group)
    assert sum(filled) == 1
    apart = answers(native_engine(tiny_model("llama", 0)), *(replace(each, group="") for each in group))
    assert [result.token_ids for result in shared] == [result.token_ids for result in apart]


def test_a_copy_of_a_prompt_that_was_aborted_before_it_was_filled_fills_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot that nobody filled holds anything; the first of the group is aborted while another prompt fills."""
    (right,) = answers(native_engine(tiny_model("llama", 0)), request("b", prompt=range(3, 15)))
    engine = native_engine(tiny_model("llama", 0), rows=4, fill_tokens=32)
    fill = Decoder.fill

    def aborting(decoder: Decoder, slots: Sequence[int], sequences: Sequence[Sequence[int]], **more: bool) -> None:
        fill(decoder, slots, sequences, **more)
        if len(sequences[0]) > 25:
            engine._batcher.end("abort", ids=frozenset({"a"}))

    monkeypatch.setattr(Decoder, "fill", aborting)
    long, *group = (
        request(name, prompt=prompt, group=name and "g" * len(prompt), seed=1)
        for name, prompt in (("long", range(1, 31)), ("a", range(3, 15)), ("b", range(3, 15)))
    )
    found = answers(engine, long, *group)
    assert [result.finish for result in found] == ["length", "abort", "length"]
    assert found[2].token_ids == right.token_ids
    assert found[2].logprobs == pytest.approx(right.logprobs, abs=1e-4)


def test_prompts_of_any_length_fill_in_passes_within_the_limit() -> None:
    requests = [request(f"r{n}", prompt=[2 + n] * (1 + 5 * n), tokens=4) for n in range(8)]
    together = answers(native_engine(tiny_model("llama", 0), rows=8), *requests)
    apart = answers(native_engine(tiny_model("llama", 0), rows=8, fill_tokens=20), *requests)
    assert [result.token_ids for result in together] == [result.token_ids for result in apart]


def test_a_window_shorter_than_the_sequence_hides_what_lies_before() -> None:
    model = tiny_model("mistral", 0)
    (result,) = answers(native_engine(tiny_model("mistral", 0)), request("r", prompt=range(2, 12), tokens=30))
    ids = torch.tensor([[*range(2, 12), *result.token_ids]])
    whole = torch.log_softmax(model(ids).logits[0, 9:-1], -1).gather(1, ids[0, 10:, None])[:, 0]
    assert result.logprobs == pytest.approx(whole.tolist(), abs=1e-4)


class Poisoned:
    """A model whose forward pass fails where `fails` says so of the tokens that it is given."""

    def __init__(self, model: Any) -> None:
        self.fails: Callable[[torch.Tensor], bool] = lambda ids: False
        self.model = model
        forward = model.forward

        @wraps(forward)
        def poisoned(**given: Any) -> Any:
            if self.fails(given["input_ids"]):
                raise RuntimeError("poisoned")
            return forward(**given)

        model.forward = poisoned


def test_a_prompt_that_fails_costs_only_its_own_requests() -> None:
    poisoned = Poisoned(tiny_model("llama", 0))
    engine = native_engine(poisoned.model, rows=8)
    poisoned.fails = lambda ids: ids.shape[1] > 1 and bool((ids == POISON).any())
    bad = [request(f"bad{n}", prompt=(3, POISON, 5), group="bad") for n in range(3)]
    good = [request(f"good{n}", prompt=(3, 4, 5), group="good") for n in range(2)]
    results = answers(engine, *bad, *good)
    assert [result.finish for result in results[:3]] == ["error"] * 3
    assert "poisoned" in results[0].error
    assert [result.finish for result in results[3:] if POISON not in result.token_ids] != []


def test_a_pass_that_fails_ends_who_sits_and_the_engine_serves_on() -> None:
    poisoned = Poisoned(tiny_model("llama", 0))
    engine = native_engine(poisoned.model, rows=2)
    left = [4]

    def fails(ids: torch.Tensor) -> bool:
        left[0] -= 1
        return left[0] == 0

    poisoned.fails = fails
    results = answers(engine, *(request(f"r{n}") for n in range(4)))
    assert [result.finish for result in results] == ["error", "error", "length", "length"]
    assert "decoding failed: RuntimeError('poisoned')" in results[0].error


def test_an_engine_whose_passes_all_fail_stops_with_the_cause() -> None:
    poisoned = Poisoned(tiny_model("llama", 0))
    engine = native_engine(poisoned.model, rows=1)
    poisoned.fails = lambda ids: ids.shape[1] == 1
    streams = [Stream(engine, request(f"r{n}")) for n in range(5)]

    async def ask() -> None:
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(stream.result)
            with pytest.raises(GenerationError, match="3 passes in a row failed"):
                await engine.run()

    anyio.run(ask)
    assert {stream.results[0].finish for stream in streams} == {"error"}
    with pytest.raises(GenerationError, match="passes in a row"):
        anyio.run(engine.pause)


def test_who_reads_an_engine_that_stops_gets_what_was_made() -> None:
    engine = native_engine(tiny_model("llama", 0))
    stream = Stream(engine, request("r", tokens=50))

    async def ask() -> None:
        async with anyio.create_task_group() as tasks, serving(engine):
            tasks.start_soon(stream.result)
            await stream.until(3)

    anyio.run(ask)
    assert stream.results[0].finish == "abort"
    assert len(stream.results[0].token_ids) >= 3


def test_status_and_aborts_wait_for_no_pass() -> None:
    """CASE-B18, CASE-B20: five are told, and their slots are free, while the device still works on their tokens."""
    begun, release = anyio.Event(), anyio.Event()

    async def held(call: Callable[[], Any]) -> Any:
        begun.set()
        await release.wait()
        return call()

    engine = NativeEngine(tiny_model("llama", 0), NativeSettings(4, 64, 2**30), blocking=held)
    results: list[Result] = []

    async def ask() -> None:
        results.extend(await engine.generate_group([request(f"r{n}") for n in range(5)], lambda: None))

    async def main() -> None:
        async with serving(engine):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await begun.wait()
                stats = await engine.stats()
                assert (stats.running, stats.waiting) == (4, 1)
                await engine.abort()
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            release.set()
            assert (await Stream(engine, request("next")).result()).finish == "length"

    anyio.run(main)
    assert [result.finish for result in results] == ["abort"] * 5


def test_a_second_update_is_refused_while_one_is_under_way() -> None:
    engine = native_engine(tiny_model("llama", 0))
    state = tiny_model("llama", 1).state_dict()

    async def update() -> None:
        async with serving(engine), anyio.create_task_group() as tasks:
            tasks.start_soon(engine.update_weights, 1, state)
            await checkpoint()
            with pytest.raises(VersionError, match="update to version 2 while 1 is under way"):
                await engine.update_weights(2, state)

    anyio.run(update)


def test_one_name_of_tied_weights_is_enough_and_what_differs_is_named() -> None:
    model, other = tiny_model("qwen2", 0), tiny_model("qwen2", 1)
    state = dict(other.state_dict())
    del state["lm_head.weight"]
    before = model.model.embed_tokens.weight.clone()
    staged = stage(model, state)
    assert torch.equal(model.model.embed_tokens.weight, before)
    staged.swap()
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    del state["model.norm.weight"]
    with pytest.raises(VersionError, match=r"1 of \d+ weights differ in name or shape, first model.norm.weight"):
        stage(model, state)


def test_staged_weights_are_copies_of_the_callers() -> None:
    model = tiny_model("llama", 0)
    state = {name: tensor.clone() for name, tensor in tiny_model("llama", 1).state_dict().items()}
    expected = state["model.norm.weight"].clone()
    staged = stage(model, state)
    state["model.norm.weight"].zero_()
    staged.swap()
    assert torch.equal(model.model.norm.weight, expected)


def test_a_model_whose_cache_does_not_fit_keeps_its_own_attention() -> None:
    model = tiny_model("llama", 0)
    own = model.config._attn_implementation
    with pytest.raises(ConfigError, match=r"the budget is 100; raise it \(collector.cache_gib\)"):
        Decoder(model, NativeSettings(4, 32, 100))
    assert model.config._attn_implementation == own


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="burst is 0"):
        NativeSettings(1, 8, 1, burst=0)
    with pytest.raises(ConfigError, match="length is 1"):
        NativeSettings(1, 1, 1)
    with pytest.raises(ConfigError, match="needs 8192 bytes of key-value cache and the budget is 100"):
        Decoder(tiny_model("llama", 0), NativeSettings(4, 32, 100))


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_nothing_of_an_engine_asleep_is_on_its_device(cache: Any) -> None:
    """Weights and cache leave with a response in flight, and come back as much as they were."""
    engine = native_engine(tiny_model("llama", 0))
    decoder = engine._decoder
    whole = decoder.device_bytes
    stream = Stream(engine, request("long", tokens=40))

    async def ask() -> None:
        async with serving(engine), anyio.create_task_group() as tasks:
            tasks.start_soon(stream.result)
            await stream.until(1)
            await engine.sleep(cache)
            assert decoder.device_bytes == 0
            await engine.wake()
            assert decoder.device_bytes == whole > 0

    anyio.run(ask)
    assert len(stream.results[0].token_ids) == 40


def test_an_engine_that_has_stopped_neither_sleeps_nor_wakes() -> None:
    engine = native_engine(tiny_model("llama", 0))

    async def ask() -> None:
        await engine.close()
        with pytest.raises(GenerationError, match="sleep: the engine is closed"):
            await engine.sleep()

    anyio.run(ask)
