"""The PyTorch generator: seeds, distribution, log-probabilities, batches, weights, failures."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch
from transformers import LlamaForCausalLM

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.errors import GenerationError, VersionError

EOS = 1
POISON = 31


def request(
    prompt: tuple[int, ...] = (5,), seeds: Sequence[int] = (0,), tokens: int = 4, temperature: float = 1.0
) -> GroupRequest:
    return GroupRequest(prompt, tuple(seeds), tokens, temperature)


async def all_of(generator: Any, requests: Sequence[GroupRequest]) -> list[list[Completion]]:
    """Send requests together; answers in their order."""
    found: dict[int, list[Completion]] = {}

    async def one(i: int) -> None:
        found[i] = list(await generator.generate(requests[i]))

    async with anyio.create_task_group() as tasks:
        for i in range(len(requests)):
            tasks.start_soon(one, i)
    return [found[i] for i in range(len(requests))]


def answers(running: Any, model: Any, requests: Sequence[GroupRequest], **settings: Any) -> list[list[Completion]]:
    async def main() -> list[list[Completion]]:
        async with running(model, **settings) as generator:
            return await all_of(generator, requests)

    return run_virtual(main)


def test_a_sample_is_a_function_of_its_seed(running: Any, llama: Any) -> None:
    """Alone, or decoded with others of other lengths, in any order of seeds, a seed gives the same tokens."""
    requests = [request((5, 6, 7), range(8), 6), request((9,), range(8, 20), 3), request((4, 4, 4, 4), (7, 0), 9)]
    together = answers(running, llama, requests)
    apart = answers(running, llama, requests, alone=True)
    singly = [
        [answers(running, llama, [request(r.prompt_ids, (s,), r.max_new_tokens)])[0][0] for s in r.seeds]
        for r in requests
    ]
    reversed_ = answers(running, llama, [request(r.prompt_ids, r.seeds[::-1], r.max_new_tokens) for r in requests])
    tokens = [[c.token_ids for c in group] for group in together]
    assert len({c for group in tokens for c in group}) > 10
    for other in (apart, singly, [group[::-1] for group in reversed_]):
        assert [[c.token_ids for c in group] for group in other] == tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_with_the_probabilities_of_the_tempered_softmax(
    running: Any, fixed_logits: Any, temperature: float
) -> None:
    """Chi-square over 4,000 seeds against the closed form; a token of probability 0 never comes."""
    logits = [0.3, -math.inf, 1.2, -0.7, -math.inf, 0.0]
    (group,) = answers(running, fixed_logits(logits), [request((5,), range(4000), 1, temperature)])
    counts = Counter(completion.token_ids[0] for completion in group)
    weights = [math.exp(x / temperature) for x in logits]
    expected = [4000 * w / sum(weights) for w in weights]
    assert set(counts) == {0, 2, 3, 5}
    chi_square = sum((counts[i] - n) ** 2 / n for i, n in enumerate(expected) if n)
    assert chi_square < 16.27  # The 99.9th percentile with 3 degrees of freedom.
    for completion in group:
        p = weights[completion.token_ids[0]] / sum(weights)
        assert completion.logprobs[0] == pytest.approx(math.log(p), abs=1e-6)


def test_later_tokens_are_drawn_afresh(running: Any, fixed_logits: Any) -> None:
    """Two tokens of one sample are independent: over 4,000 seeds all pairs are equally frequent."""
    (group,) = answers(running, fixed_logits([0.0, -math.inf, 0.0, 0.0]), [request((5,), range(4000), 2)])
    pairs = Counter(completion.token_ids for completion in group)
    assert len(pairs) == 9
    assert sum((n - 4000 / 9) ** 2 / (4000 / 9) for n in pairs.values()) < 26.12  # 99.9th percentile, 8 degrees.


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_teacher_forcing(running: Any, llama: Any, temperature: float) -> None:
    """Prompts of unequal lengths in one decode batch: the cache and the left padding change nothing."""
    requests = [request((5,), range(4), 8, temperature), request((6, 7, 8, 9, 10, 11), range(4), 5, temperature)]
    for sent, group in zip(requests, answers(running, llama, requests), strict=True):
        for completion in group:
            ids = [*sent.prompt_ids, *completion.token_ids]
            with torch.no_grad():
                table = torch.log_softmax(llama(torch.tensor([ids])).logits[0] / temperature, -1)
            start = len(sent.prompt_ids)
            expected = [float(table[start + t - 1, token]) for t, token in enumerate(completion.token_ids)]
            assert list(completion.logprobs) == pytest.approx(expected, abs=1e-5)


def test_a_model_with_learned_positions_decodes_as_it_would_alone(running: Any) -> None:
    """Its arguments come in another order, and unlike rotary ones its positions must start after the padding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
        torch.nn.init.normal_(model.transformer.wpe.weight)
    requests = [request((5,), range(4), 6), request((6, 7, 8, 9, 10, 11), range(4), 6)]
    for sent, group in zip(requests, answers(running, model, requests), strict=True):
        for completion in group:
            ids = [*sent.prompt_ids, *completion.token_ids]
            with torch.no_grad():
                table = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
            start = len(sent.prompt_ids)
            expected = [float(table[start + t - 1, token]) for t, token in enumerate(completion.token_ids)]
            assert list(completion.logprobs) == pytest.approx(expected, abs=1e-5)


def test_a_response_ends_with_the_end_token_or_at_its_own_limit(running: Any, fixed_logits: Any) -> None:
    """Limits differ within one decode batch; the end token is part of the response."""
    requests = [request((5,), range(200), 1), request((5,), range(200), 5)]
    for sent, group in zip(requests, answers(running, fixed_logits([0.0, 0.0, 0.0]), requests), strict=True):
        for completion in group:
            *before, last = completion.token_ids
            assert EOS not in before
            assert completion.finished == (last == EOS)
            assert len(completion.token_ids) == sent.max_new_tokens or completion.finished
            assert len(completion.logprobs) == len(completion.token_ids) <= sent.max_new_tokens
            assert completion.spans == ((0, 0, len(completion.token_ids)),)
        lengths = Counter(len(completion.token_ids) for completion in group)
        assert len(lengths) == sent.max_new_tokens


def test_decoding_stops_when_all_have_ended(running: Any, fixed_logits: Any) -> None:
    model = fixed_logits([-math.inf, 0.0, -math.inf])
    answers(running, model, [request((5,), range(3), 50)])
    assert model.batches == [3]


def test_a_batch_holds_at_most_decode_samples_of_one_temperature(running: Any, fixed_logits: Any) -> None:
    model = fixed_logits([-math.inf, 0.0, -math.inf])
    two = [request((5,), (0, 1))] * 3
    answers(
        running,
        model,
        [*two, request((5,), (0, 1), temperature=0.5), request((5,), (2,), temperature=0.5)],
        decode_samples=4,
    )
    assert model.batches == [4, 2, 3]


def test_alone_every_group_is_a_batch_of_its_own(running: Any, fixed_logits: Any) -> None:
    model = fixed_logits([-math.inf, 0.0, -math.inf])
    answers(running, model, [request((5,), (0, 1))] * 3, alone=True)
    assert model.batches == [2, 2, 2]


def test_weights_change_between_batches_and_not_within(running: Any, fixed_logits: Any, make_gate: Any) -> None:
    """The update answers only after the swap; the running batch keeps the old weights; the waiting one gets the new."""
    only_2, only_0 = [-math.inf, -math.inf, 0.0], [0.0, -math.inf, -math.inf]

    async def main() -> None:
        gate = make_gate()
        seen: dict[str, Any] = {}
        async with running(fixed_logits(only_2), blocking=gate) as generator, anyio.create_task_group() as tasks:

            async def generate(name: str) -> None:
                seen[name] = (await generator.generate(request((5,), (0,), 3)))[0]

            async def update() -> None:
                await generator.update_weights(4, {"logits": torch.tensor(only_0)})
                seen["update"] = (await generator.stats())["version"]

            tasks.start_soon(generate, "running")
            await anyio.sleep(1)
            tasks.start_soon(generate, "waiting")
            tasks.start_soon(update)
            await anyio.sleep(1)
            assert (seen, (await generator.stats())["version"], gate.calls) == ({}, 0, 1)
            gate.open()
            await anyio.sleep(1)
        assert seen["running"].token_ids == (2, 2, 2)
        assert seen["running"].spans == ((0, 0, 3),)
        assert seen["waiting"].token_ids == (0, 0, 0)
        assert seen["waiting"].spans == ((4, 0, 3),)
        assert seen["update"] == 4

    run_virtual(main)


def test_a_version_that_goes_back_is_refused(running: Any, fixed_logits: Any) -> None:
    """CASE-A5: 57, then 1; the weights of 57 stay. The same version again, a repeated publish, is fine."""

    async def main() -> None:
        async with running(fixed_logits([0.0, 0.0])) as generator:
            await generator.update_weights(57, {"logits": torch.tensor([0.0, -math.inf])})
            with pytest.raises(VersionError, match=r"57.*1"):
                await generator.update_weights(1, {"logits": torch.tensor([-math.inf, 0.0])})
            (completion,) = await generator.generate(request())
            assert completion.token_ids == (0, 0, 0, 0)
            await generator.update_weights(57, {"logits": torch.tensor([-math.inf, 0.0])})
            assert (await generator.generate(request()))[0].token_ids == (1,)

    run_virtual(main)


@pytest.mark.parametrize("state", [{}, {"logits": torch.zeros(3)}, {"logits": torch.zeros(2), "more": torch.zeros(1)}])
def test_weights_that_do_not_fit_change_nothing(running: Any, fixed_logits: Any, state: Any) -> None:
    """CASE-A6, invariant 8: the update fails with the reason, the old version serves on, and a good update follows."""

    async def main() -> None:
        async with running(fixed_logits([0.0, -math.inf])) as generator:
            with pytest.raises(VersionError, match=r"version 3 was not loaded.*logits|version 3 was not loaded.*more"):
                await generator.update_weights(3, state)
            assert (await generator.stats())["version"] == 0
            assert (await generator.generate(request()))[0].token_ids == (0, 0, 0, 0)
            await generator.update_weights(3, {"logits": torch.tensor([-math.inf, 0.0])})
            assert (await generator.generate(request()))[0].spans == ((3, 0, 1),)

    run_virtual(main)


def test_a_model_whose_forward_keeps_all_logits_says_the_same(running: Any, llama: Any) -> None:
    """Not every architecture takes `logits_to_keep`."""

    class Plain(LlamaForCausalLM):  # type: ignore[misc]
        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, past_key_values: Any, use_cache: bool
        ) -> Any:
            assert use_cache
            return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=True)

    requests = [request((5, 6, 7), range(4), 6)]
    expected = answers(running, llama, requests)
    llama.__class__ = Plain
    assert answers(running, llama, requests) == expected


def test_half_fitting_weights_are_not_half_loaded(running: Any, llama: Any) -> None:
    async def main() -> None:
        before = {name: value.clone() for name, value in llama.state_dict().items()}
        state = {name: value + 1 for name, value in before.items()}
        state.popitem()
        async with running(llama) as generator:
            with pytest.raises(VersionError):
                await generator.update_weights(1, state)
        assert all(torch.equal(llama.state_dict()[name], value) for name, value in before.items())

    run_virtual(main)


def test_an_update_after_one_that_was_given_up_is_not_lost(running: Any, fixed_logits: Any, make_gate: Any) -> None:
    """A publish that timed out during its swap and is tried again."""

    async def main() -> None:
        gate = make_gate()
        async with running(fixed_logits([0.0, 0.0]), blocking=gate) as generator:
            with anyio.move_on_after(1):
                await generator.update_weights(1, {"logits": torch.zeros(2)})
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generator.update_weights, 2, {"logits": torch.ones(2)})
                await anyio.sleep(1)
                gate.open()
                with anyio.fail_after(5):
                    while (await generator.stats())["version"] != 2:
                        await anyio.sleep(0.1)

    run_virtual(main)


def test_two_updates_at_once_are_an_error(running: Any, fixed_logits: Any, make_gate: Any) -> None:
    async def main() -> None:
        gate = make_gate()
        async with running(fixed_logits([0.0, 0.0]), blocking=gate) as generator, anyio.create_task_group() as tasks:
            tasks.start_soon(generator.update_weights, 1, {"logits": torch.zeros(2)})
            await anyio.sleep(1)
            with pytest.raises(VersionError, match="version 2 while 1"):
                await generator.update_weights(2, {"logits": torch.zeros(2)})
            gate.open()

    run_virtual(main)


def test_a_failing_batch_reaches_its_own_requests_alone(running: Any, fixed_logits: Any) -> None:
    """The others of the queue go on, and so does the generator."""

    async def main() -> None:
        results: dict[int, str] = {}
        async with running(fixed_logits([0.0, 0.0]), alone=True) as generator, anyio.create_task_group() as tasks:

            async def one(i: int) -> None:
                try:
                    await generator.generate(request((POISON if i == 1 else 5,)))
                    results[i] = "done"
                except GenerationError as error:
                    results[i] = str(error)

            for i in range(3):
                tasks.start_soon(one, i)
            await anyio.sleep(1)
            assert (await generator.stats())["running"] == 0
        assert (results[0], results[2]) == ("done", "done")
        assert "poisoned prompt" in results[1]

    run_virtual(main)


def test_a_request_that_is_cancelled_gives_up_its_place(running: Any, fixed_logits: Any, make_gate: Any) -> None:
    async def main() -> None:
        gate, model = make_gate(), fixed_logits([-math.inf, 0.0])
        async with running(model, blocking=gate) as generator, anyio.create_task_group() as tasks:
            tasks.start_soon(generator.generate, request((5,), (0,)))
            await anyio.sleep(1)
            for _ in range(3):
                with anyio.move_on_after(1):
                    await generator.generate(request((5,), range(10)))
            assert (await generator.stats())["waiting"] == 0
            tasks.start_soon(generator.generate, request((5,), (0, 1)))
            await anyio.sleep(1)
            gate.open()
        assert model.batches == [1, 2]

    run_virtual(main)


def test_stats_count_tokens_and_places(running: Any, fixed_logits: Any, make_gate: Any) -> None:
    async def main() -> None:
        gate = make_gate()
        async with running(fixed_logits([0.0, -math.inf]), blocking=gate, alone=True) as generator:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(generator.generate, request((5,), (0, 1), 3))
                await anyio.sleep(1)
                stats = await generator.stats()
                assert [stats[name] for name in ("running", "waiting", "tokens", "busy_s")] == [2, 4, 0, 1.0]
                gate.open()
            await anyio.sleep(1)
            stats = await generator.stats()
            assert [stats[name] for name in ("running", "waiting", "tokens", "busy_s")] == [0, 0, 18, 1.0]

    run_virtual(main)


def test_a_prompt_that_fails_takes_none_of_its_batch_with_it(running: Any, fixed_logits: Any) -> None:
    """FOUND-C9: a batch that failed decodes again, one request at a time."""
    model = fixed_logits([-math.inf, 0.0])
    ended: dict[int, Any] = {}

    async def main() -> None:
        async with running(model) as generator, anyio.create_task_group() as tasks:

            async def one(i: int) -> None:
                try:
                    ended[i] = [c.token_ids for c in await generator.generate(request((POISON if i == 1 else 5,)))]
                except GenerationError as error:
                    ended[i] = str(error)

            for i in range(4):
                tasks.start_soon(one, i)

    run_virtual(main)
    assert [ended[i] for i in (0, 2, 3)] == [[(1,)]] * 3
    assert "poisoned prompt" in ended[1]
    assert model.batches == [1, 1, 1]


def test_a_prompt_without_tokens_fails_before_it_decodes(running: Any, fixed_logits: Any) -> None:
    """FOUND-C9: where it would make its whole batch fail."""
    model = fixed_logits([0.0, -math.inf])

    async def main() -> None:
        async with running(model) as generator:
            with pytest.raises(GenerationError, match="no tokens"):
                await generator.generate(request(()))

    run_virtual(main)
    assert model.batches == []


def test_a_request_is_told_when_its_turn_comes_and_when_it_waits_again(
    running: Any, fixed_logits: Any, make_gate: Any
) -> None:
    """FOUND-C13: decoding and waiting for it are two waits."""
    turns: list[tuple[str, bool, float]] = []

    def asked(name: str, token: int) -> GroupRequest:
        return GroupRequest((token,), (0,), 4, 1.0, lambda on: turns.append((name, on, virtual_clock())))

    async def main() -> None:
        gate = make_gate()
        async with (
            running(fixed_logits([-math.inf, 0.0]), blocking=gate) as generator,
            anyio.create_task_group() as group,
        ):
            group.start_soon(generator.generate, asked("first", 5))
            await anyio.sleep(1)
            group.start_soon(generator.generate, asked("second", 5))
            group.start_soon(generator.generate, asked("third", 6))
            await anyio.sleep(1)
            gate.open()

    run_virtual(main)
    assert turns == [("first", True, 0.0), ("second", True, 2.0), ("third", True, 2.0)]
    turns.clear()

    async def fails() -> None:
        async with running(fixed_logits([-math.inf, 0.0])) as generator:
            with pytest.raises(ExceptionGroup):
                await all_of(generator, [asked("good", 5), asked("bad", POISON)])

    run_virtual(fails)
    assert [(name, on) for name, on, _ in turns if name == "bad"] == [("bad", True), ("bad", False), ("bad", True)]


def test_a_generator_asleep_begins_no_batch_takes_weights_and_goes_on(running: Any, llama: Any) -> None:
    plain = answers(running, llama, [request((5, 6), range(3))])
    state = {name: value.clone() for name, value in llama.state_dict().items()}
    found: list[list[Completion]] = []

    async def main() -> None:
        async with running(llama) as generator, anyio.create_task_group() as tasks:
            await generator.sleep("keep")

            async def ask() -> None:
                found.append(list(await generator.generate(request((5, 6), range(3)))))

            tasks.start_soon(ask)
            await generator.update_weights(3, state)
            await anyio.sleep(10.0)
            assert not found
            await generator.wake()

    run_virtual(main)
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in plain]
    assert {c.spans[0][0] for c in found[0]} == {3}
