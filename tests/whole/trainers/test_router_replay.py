"""Router replay: what the native engine records of a mixture of experts, and what the trainer makes of it."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from asyncrl import ConfigError, run
from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.environments.transcript import Transcript
from asyncrl.collectors.flat import GroupFailed, flatten
from asyncrl.collectors.generators.base import Completion
from asyncrl.collectors.tasks import Reward
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.model.routers import routers_of
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.columns import ROUTED_EXPERTS
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

WORDS, LAYERS = 40, 2


def moe(family: str = "mixtral", *, k: int = 2, tied: bool = False, seed: int = 1) -> Any:
    """Build a random mixture of 8 experts, whose logits, if `tied`, differ by less than bfloat16 can tell."""
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts_per_tok": k,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    if family == "mixtral":
        config: Any = MixtralConfig(**sizes, intermediate_size=32, num_local_experts=8)
    else:
        config = Qwen3MoeConfig(
            **sizes,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_experts=8,
            head_dim=16,
            norm_topk_prob=False,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for router in routers_of(model):
            torch.nn.init.normal_(router.weight, std=0.2)
            if tied:
                router.weight.data = router.weight.data[:1] + 1e-3 * router.weight.data
    return model


def sampled(model: Any, requests: Sequence[Request]) -> list[Result]:
    """Return the native engine's results, in order."""

    async def main() -> list[Result]:
        settings = NativeSettings(8, 64, 2**28, burst=3, experts=True)
        engine = NativeEngine(model, settings, blocking=in_place)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            results = await engine.generate_group(requests, lambda: None)
            tasks.cancel_scope.cancel()
        return results

    return anyio.run(main)


def asking(count: int, *, tokens: int = 24, prompt: Sequence[int] = (3, 1, 4, 1, 5)) -> list[Request]:
    return [Request(str(i), tuple(prompt), Sampling(tokens), seed=i, group="g", stream=False) for i in range(count)]


def own_choice(model: Any, ids: Sequence[int]) -> Any:
    """Return what a model chooses in one pass over a sequence: (tokens, layers, k)."""
    kept: list[torch.Tensor] = []
    hooks = [r.register_forward_hook(lambda _r, _i, out: kept.append(out[2])) for r in routers_of(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(kept, dim=1).numpy()


def backend(model: Any, *, replay: bool = True, **more: Any) -> TorchBackend:
    settings = TorchSettings(1.0, Clip(0.2, 0.2, 3.0), (0.9, 0.999), 0.0, 1.0, router_replay=replay, **more)
    return TorchBackend(model, settings, pad_id=0)


def rows_of(results: Sequence[Result], prompt: Sequence[int], *, routed: bool) -> Rows:
    return Rows(
        tokens=[torch.tensor([*prompt, *result.token_ids], dtype=torch.int32) for result in results],
        prompt_tokens=[len(prompt)] * len(results),
        logprobs=[torch.tensor(result.logprobs) for result in results],
        advantages=[1.0] * len(results),
        withheld=[0] * len(results),
        filler=False,
        extras={ROUTED_EXPERTS: [torch.from_numpy(r.experts) for r in results if r.experts is not None]}
        if routed
        else {},
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_the_engine_records_what_a_whole_pass_chooses(family: str) -> None:
    """Samples share their prompt, end at different times and move to other slots; the last token takes no pass."""
    prompt = (3, 1, 4, 1, 5)
    requests = [
        *asking(3),
        *(Request("a", prompt, Sampling(5 + 4 * i), seed=9 + i, group="h", stream=False) for i in range(3)),
    ]
    for request, result in zip(requests, sampled(moe(family), requests), strict=True):
        assert result.experts is not None
        ids = [*request.prompt_ids, *result.token_ids]
        assert result.experts.shape == (len(ids), LAYERS, 2)
        assert (result.experts[:-1] == own_choice(moe(family), ids)[:-1]).all()
        assert (result.experts[-1] == -1).all()


def test_what_goes_on_keeps_the_rows_of_its_first_attempt() -> None:
    """G8: rows of the tokens so far come from the first reply, those behind from the second, also between turns."""
    other = moe(seed=2)
    (first,) = sampled(moe(), asking(1, tokens=6))
    done = replace(first, finish="abort")
    again = Request("0", (3, 1, 4, 1, 5), Sampling(12), seed=0, done=done, stream=False)
    (second,) = sampled(moe(seed=2), [again])
    assert first.experts is not None
    assert second.experts is not None
    known = 5 + 6 - 1
    assert len(second.experts) == 5 + 12
    assert (second.experts[:known] == first.experts[:known]).all()
    ids = [3, 1, 4, 1, 5, *second.token_ids]
    assert not (own_choice(other, ids)[:known] == first.experts[:known]).all()
    assert (second.experts[known:-1] == own_choice(other, ids)[known:-1]).all()
    transcript = Transcript((3, 1, 4, 1, 5))
    transcript.generated(transcript.ids, first)
    transcript.put([7, 8])
    (turn,) = sampled(moe(seed=2), asking(1, tokens=4, prompt=transcript.ids))
    transcript.generated(transcript.ids, turn)
    made = transcript.completion(finished=True, outcome=None).experts
    assert made is not None
    assert turn.experts is not None
    assert len(made) == len(transcript.ids)
    assert (made[:known] == first.experts[:known]).all()
    assert (made[known:] == turn.experts[known:]).all()


def test_a_cache_made_anew_leaves_the_rows_of_tokens_that_were_sampled_with_the_old_one() -> None:
    """The update comes behind the first tokens; what comes later is chosen by the new weights."""

    async def main() -> Result:
        engine = NativeEngine(moe(), NativeSettings(2, 64, 2**28, burst=3, experts=True), blocking=in_place)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            async for item in engine.generate(replace(asking(1)[0], stream=True)):
                if isinstance(item, Result):
                    tasks.cancel_scope.cancel()
                    return item
                if not (await engine.stats()).version:
                    await engine.update_weights(1, moe(seed=2).state_dict(), "recompute")
        raise AssertionError("the engine gave no result")

    result = anyio.run(main)
    (_, _, made), _ = result.spans
    ids, known = [3, 1, 4, 1, 5, *result.token_ids], 5 + made - 1
    assert result.experts is not None
    assert (result.experts[:known] == own_choice(moe(), ids)[:known]).all()
    assert (result.experts[known:-1] == own_choice(moe(seed=2), ids)[known:-1]).all()


def test_a_sibling_that_sits_down_on_a_cache_made_anew_has_the_experts_of_its_own_weights() -> None:
    """Two slots and a group of three: the third begins once the second has ended, after the update."""
    requests = asking(3, tokens=40)
    requests[1] = replace(requests[1], sampling=Sampling(12))

    async def main() -> list[Result]:
        engine = NativeEngine(moe(), NativeSettings(2, 64, 2**28, burst=1, experts=True), blocking=in_place)
        results: dict[str, Result] = {}

        async def ask(request: Request) -> None:
            (results[request.id],) = await engine.generate_group([request], lambda: None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            async with anyio.create_task_group() as readers:
                for request in requests:
                    readers.start_soon(ask, request)
                while (await engine.stats()).running < 2:
                    await anyio.sleep(0)
                await engine.update_weights(1, moe(seed=2).state_dict(), "recompute")
            tasks.cancel_scope.cancel()
        return [results[request.id] for request in requests]

    *_, third = anyio.run(main)
    assert [version for version, _, _ in third.spans] == [1]
    assert third.experts is not None
    ids = [*requests[2].prompt_ids, *third.token_ids]
    assert (third.experts[:-1] == own_choice(moe(seed=2), ids)[:-1]).all()


def gap(model: Any, *, replay: bool) -> float:
    """Return how far a trainer in float32 is from a sampler in bfloat16, in the mean over tokens."""
    results = sampled(copy.deepcopy(model).to(torch.bfloat16), asking(6, tokens=40))
    rows = rows_of(results, (3, 1, 4, 1, 5), routed=replay)
    found = backend(copy.deepcopy(model), replay=replay).logprobs(rows)
    return float(np.mean([float((a - b).abs().mean()) for a, b in zip(found, rows.logprobs, strict=True)]))


def test_with_nearly_tied_routers_replay_agrees_as_a_dense_model_does() -> None:
    """A model that takes all of its experts has no choice: it is the dense one."""
    dense = gap(moe(k=8, tied=True), replay=False)
    without, replayed = gap(moe(tied=True), replay=False), gap(moe(tied=True), replay=True)
    assert replayed < 2 * dense, (dense, replayed, without)
    assert without > 10 * dense, (dense, replayed, without)


@pytest.mark.parametrize("more", [{}, {"packed": True}, {"recompute": True}, {"align": 4}])
def test_given_choices_are_replayed_forwards_and_backwards(more: dict[str, Any]) -> None:
    """Other experts than the model's own: gradients are those of a pass whose routers choose them, padding aside."""
    prompt = (3, 1, 4, 1, 5)
    model = moe()
    results = sampled(moe(), asking(3))
    other = [np.where(r.experts < 0, r.experts, (r.experts + 3) % 8) for r in results if r.experts is not None]
    rows = rows_of(results, prompt, routed=True)
    rows.extras[ROUTED_EXPERTS][:] = [torch.from_numpy(experts) for experts in other]  # type: ignore[index]
    replaying = backend(model, **more)
    own = [torch.cat(replaying.logprobs(rows_of(results, prompt, routed=False)))]
    found = torch.cat(replaying.logprobs(rows))
    assert float((found - own[0]).abs().max()) > 0.01
    total = sum(len(result.token_ids) for result in results)
    replaying.accumulate(rows, total)
    gradients = replaying.gradients()
    expected = torch.zeros_like(gradients)
    for result, experts in zip(results, other, strict=True):
        plain = moe()
        _force(plain, experts)
        one = backend(plain, replay=False)
        one.accumulate(rows_of([result], prompt, routed=False), total)
        expected += one.gradients()
    assert torch.allclose(gradients, expected, atol=1e-6)
    routers = [parameter for name, parameter in model.named_parameters() if "gate.weight" in name]
    assert len(routers) == LAYERS


def _force(model: Any, experts: Any) -> None:
    """Have the routers choose these experts, by transformers' own code around another topk."""

    def forced(layer: int, router: Any) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            chosen = torch.tensor(experts[:, layer]).long()
            weights = torch.softmax(logits.float(), -1)
            own = torch.topk(weights, 2).indices
            chosen = torch.where(chosen < 0, own, chosen)
            taken = weights.gather(-1, chosen)
            return logits, taken / taken.sum(-1, keepdim=True), chosen

        return forward

    for layer, router in enumerate(routers_of(model)):
        router.forward = forced(layer, router)


def test_rows_that_do_not_fit_are_an_error_or_fail_their_group() -> None:
    results = sampled(moe(), asking(2, tokens=4))
    rows = rows_of(results, (3, 1, 4, 1, 5), routed=True)
    odd = [torch.from_numpy(r.experts[:-1]) for r in results if r.experts is not None]
    short = replace(rows, extras={ROUTED_EXPERTS: odd})
    with pytest.raises(AsyncRLError, match=r"have the shape \(8, 2, 2\); 9 tokens, 2 layers and 2 experts"):
        backend(moe()).logprobs(short)
    completions = [
        Completion(r.token_ids, r.logprobs, r.spans, True, experts=r.experts if not i else r.experts[:-1])
        for i, r in enumerate(results)
        if r.experts is not None
    ]
    grant = Grant(0, Prompt(0, "?"), 2, 3)
    with pytest.raises(GroupFailed, match=r"experts of 9 tokens have the shape \(8, 2, 2\)"):
        flatten(grant, 0, (3, 1, 4, 1, 5), completions, [Reward(1.0)] * 2, {})


@pytest.fixture
def checkpoint(tmp_path: Path, save_checkpoint: Any) -> Path:
    """A tiny Mixtral with the tokenizer of digits."""
    from transformers import MixtralConfig

    folder: Path = save_checkpoint(
        MixtralConfig(
            vocab_size=15,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    return folder


def test_a_whole_run_of_a_tiny_mixture_learns_with_replay(checkpoint: Path, tmp_path: Path) -> None:
    """The router is trained too, and at every step the ratio begins at 1."""
    out = tmp_path / "out"
    summary = run(
        "default",
        out,
        {
            "run.runtime": "local",
            "model.path": str(checkpoint),
            "trainer.router_replay": True,
            "trainer.ranks": 1,
            "trainer.learning_rate": 0.003,
            "trainer.sft_warm_up_steps": 30,
            "rollout.max_staleness": 0,
            "rollout.groups_per_step": 4,
            "run.batches": 25,
            "evaluation.every": 50,
        },
    )
    assert summary.exit_code == 0
    content = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert content["reward_last_10"] > content["reward_first_10"] + 0.1, content
    lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [event["metrics"] for event in map(json.loads, lines) if event["type"] == "step_ended"]
    assert [metrics["train/ratio_mean"] for metrics in steps] == pytest.approx([1.0] * len(steps), abs=1e-4)


def test_what_cannot_be_replayed_is_refused_at_the_start(llama_checkpoint: Path, tmp_path: Path) -> None:
    for overrides, why in (
        ({"model.path": str(llama_checkpoint)}, "LlamaForCausalLM has no router that is known"),
        ({"collector.engine": "batch"}, "trainer.router_replay .* is True, and collector.engine is 'batch'"),
        (
            {"collector.engine": "http", "model.path": str(llama_checkpoint), "collector.servers": ["http://x:1"]},
            "only the native engine tells which experts",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            run("default", tmp_path / "out", {"run.runtime": "local", "trainer.router_replay": True, **overrides})
