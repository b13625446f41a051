"""Each token tells which weights made it, and which made the cache behind it: spans say the same."""

from collections.abc import Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint
from torch import nn
from transformers import LlamaConfig

from asyncrl.collectors.engines.base import Cache, Request, Result, Sampling, Spans
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.generators.engine_generator import EngineGenerator, OnUpdate
from asyncrl.engine.aio.blocking import Blocking, in_place, in_thread
from asyncrl.engine.testing.conformance.engine_contract import Stream, check_result, tiles
from asyncrl.engine.testing.conformance.engine_trials import serving

UPDATES = 200
TORN = 0
MIXED = 300
"""Added to the token of a version if the cache behind it is not that version's own."""


class Stamped(nn.Module):
    """Gives token 1 + v, of weights that are all v, and TORN if they are not one version's or see a wrong cache.

    What it caches of a token is the version of its weights and the token's position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=2)
        self.first = nn.Embedding(2 * MIXED, 2)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Parameter(torch.empty(7))
        self.load_state_dict(weights(self, 0))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.first

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any = None, past_key_values: Any = None, **_: Any
    ) -> Any:
        rows, length = input_ids.shape
        sums = torch.stack([value for weight in self.parameters() for value in (weight.min(), weight.max())])
        version = float(sums[0].detach())
        mixed = torch.zeros(rows, length, dtype=torch.bool)
        torn = torch.full((rows, length), bool((sums != version).any()))
        if past_key_values is not None:
            stamp = torch.stack([torch.full((rows, length), version), position_ids.float()], -1)[:, None]
            seen = (attention_mask == 0).expand(rows, 1, length, -1)[:, 0]
            cached = [past_key_values.update(stamp, stamp.clone(), layer) for layer in range(2)]
            keys, values = (torch.cat(of_layers, 1) for of_layers in zip(*cached, strict=True))
            # Per row and layer, what was cached at each position: whose weights made it, and where it was then.
            made, at = keys[:, :, None, :, 0], keys[:, :, None, :, 1]
            seen = seen[:, None]
            odd = (at != torch.arange(keys.shape[2])) | (made > version)
            torn |= (odd & seen).any(-1).any(1) | (keys != values).any()
            torn |= seen[:, 0].sum(-1) != position_ids + 1
            mixed = ((made != version) & seen).any(-1).any(1)
        token = torch.where(torn, TORN, 1 + int(version) + MIXED * mixed.long())
        return SimpleNamespace(logits=torch.full((rows, length, 2 * MIXED), -1e4).scatter(2, token[..., None], 0.0))


def weights(model: nn.Module, version: int) -> Mapping[str, torch.Tensor]:
    return {name: torch.full_like(tensor, version) for name, tensor in model.state_dict().items()}


async def churn(engine: NativeEngine, model: Stamped, random: Random, cache: Cache) -> list[tuple[Request, Result]]:
    """Update 200 times, while requests come, are aborted, paused and continued; return all results."""
    done: list[tuple[Request, Result]] = []
    partials: list[tuple[Request, Result]] = []
    asked: list[str] = []

    async def ask(request: Request) -> None:
        result = await Stream(engine, request).result()
        done.append((request, result))
        if result.finish == "abort":
            partials.append((request, result))

    async with serving(engine), anyio.create_task_group() as tasks:
        for version in range(1, UPDATES + 1):
            for _ in range(random.randrange(2)):
                group = random.randrange(4)
                prompt = tuple(range(2, 3 + 4 * group))
                sampling = Sampling(random.randrange(1, 24))
                asked.append(f"r{len(asked)}")
                tasks.start_soon(ask, Request(asked[-1], prompt, sampling, 0, f"g{group}"))
            if partials and random.random() < 0.5:
                request, partial = partials.pop(random.randrange(len(partials)))
                asked.append(f"r{len(asked)}")
                tasks.start_soon(ask, Request(asked[-1], request.prompt_ids, request.sampling, 0, done=partial))
            for _ in range(random.randrange(5)):
                await checkpoint()
            act = random.randrange(5)
            if act == 0:
                await engine.abort(asked[-random.randrange(1, 6) :])
            elif act == 1:
                await engine.pause(random.choice(["keep", "abort", "drain"]))
            await engine.update_weights(version, weights(model, version), cache)
            await engine.resume()
    return done


def native(model: Stamped, blocking: Blocking[Any], ahead: int) -> NativeEngine:
    """Return an engine of four rows; with `ahead` 1 a burst is always ahead, as on a GPU."""
    return NativeEngine(model, NativeSettings(4, 64, 2**20, burst=2, ahead=ahead), blocking=blocking)


def check_tokens(tokens: Sequence[int], spans: Spans) -> None:
    for version, first, end in spans:
        assert {token % MIXED for token in tokens[first:end]} == {1 + version}


@pytest.mark.parametrize(("cache", "blocking", "ahead"), [("keep", in_thread, 0), ("recompute", in_place, 1)])
def test_every_span_names_the_weights_that_made_its_tokens(cache: Cache, blocking: Blocking[Any], ahead: int) -> None:
    """CASE-H5: 200 updates, aborts, pauses and continuations; no token of half-written weights, nor of a torn cache."""
    model = Stamped()
    results = anyio.run(churn, native(model, blocking, ahead), model, Random(1), cache)
    spans = 0
    for request, result in results:
        check_result(request, result)
        check_tokens(result.token_ids, result.spans)
        had = len(request.done.token_ids) if request.done else 0
        for _, first, end in result.spans:
            made = result.token_ids[max(first, had) : end]
            if made and (cache == "recompute" or first <= had):
                # The first tokens of a request, or of its continuation, have a cache of their own weights.
                assert max(made) < MIXED
            elif made:
                assert min(made) > MIXED
            spans += 1
    finishes = {result.finish for _, result in results}
    assert finishes == {"length", "abort"}
    assert any(request.done for request, _ in results)
    assert spans > len(results) > 80


async def regroup(generator: EngineGenerator, model: Stamped, random: Random) -> list[Completion]:
    """Update 200 times, while groups come and some are given up; return the completions of the others."""
    made: list[Completion] = []
    out: list[anyio.CancelScope] = []

    async def ask(request: GroupRequest) -> None:
        with anyio.CancelScope() as scope:
            out.append(scope)
            made.extend(await generator.generate(request))
        out.remove(scope)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generator.run)
        async with anyio.create_task_group() as groups:
            for version in range(1, UPDATES + 1):
                if random.random() < 0.5:
                    prompt, seeds = tuple(range(2, 3 + random.randrange(8))), tuple(range(1 + random.randrange(2)))
                    groups.start_soon(ask, GroupRequest(prompt, seeds, random.randrange(1, 10), 1.0))
                for _ in range(random.randrange(8)):
                    await checkpoint()
                if out and random.random() < 0.2:
                    random.choice(out).cancel()
                await generator.update_weights(version, weights(model, version))
        tasks.cancel_scope.cancel()
    return made


@pytest.mark.parametrize(("on_update", "ahead"), [("continue", 1), ("restart", 0)])
def test_a_response_that_updates_abort_has_no_token_of_another_cache(on_update: OnUpdate, ahead: int) -> None:
    """CASE-A8: it goes on from its last token, or begins anew from its prompt and keeps nothing of the old version."""
    model = Stamped()
    engine = native(model, in_place, ahead)
    generator = EngineGenerator(engine, Sampling(12), groups=engine, on_update=on_update)
    completions = anyio.run(regroup, generator, model, Random(2))
    for completion in completions:
        assert tiles(completion.spans, len(completion.token_ids))
        check_tokens(completion.token_ids, completion.spans)
        assert max(completion.token_ids) < MIXED
    most = max(len(completion.spans) for completion in completions)
    assert most == 1 if on_update == "restart" else most > 2
    assert len(completions) > 80


def test_a_stamp_tells_half_written_weights() -> None:
    model = Stamped()
    model.load_state_dict({**weights(model, 1), "last": torch.zeros(7)})
    ids = torch.tensor([[2, 3]])
    assert model(ids, torch.ones_like(ids)).logits.argmax(-1).tolist() == [[TORN, TORN]]
