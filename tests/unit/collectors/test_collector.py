"""The collector around a fake generator: seeds, tags, what is put, and its end."""

from collections.abc import Sequence
from typing import Any

import anyio
import torch

from asyncrl.collectors.collector import sample_seed
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS
from asyncrl.engine.testing.fakes import FakeGenerator


def test_the_seed_of_a_sample_is_a_function_of_run_group_and_index() -> None:
    seeds = {(s, g, i): sample_seed(s, g, i) for s in range(4) for g in range(4) for i in range(4)}
    assert len(set(seeds.values())) == 64
    assert all(sample_seed(*place) == seed for place, seed in seeds.items())
    assert all(0 <= seed < 2**64 for seed in seeds.values())


def test_the_generator_gets_the_prompt_and_one_seed_a_sample(at_desk: Any, grant: Any) -> None:
    requests: list[GroupRequest] = []

    class Noting(FakeGenerator):
        async def generate(self, request: GroupRequest) -> Sequence[Completion]:
            requests.append(request)
            return await super().generate(request)

    async def work(desk: Any) -> None:
        await desk.collector.grant([grant(6, seed=9), grant(7, seed=9)])
        await desk.hear(2)

    at_desk(work, generator=Noting())
    for number, request in zip((6, 7), requests, strict=True):
        assert request.prompt_ids == tuple(CharTokenizer().encode(f"{number % 4}>"))
        assert request.seeds == tuple(sample_seed(9, number, i) for i in range(4))
        assert (request.temperature, request.max_new_tokens) == (0.7, 5)


def test_a_surplus_has_the_seeds_behind_those_of_the_group(at_desk: Any, one_group: Any) -> None:
    class Late(FakeGenerator):
        async def generate(self, request: GroupRequest) -> Sequence[Completion]:
            assert request.seeds == tuple(sample_seed(3, 0, i) for i in range(6))
            return (await super().generate(request))[::-1]

    group = at_desk(one_group, generator=Late(), oversample=2)
    assert group.keys == ("v0_p0_g0", "v0_p0_g1", "v0_p0_g2", "v0_p0_g3")


def test_a_group_is_put_whole_with_its_tags_and_columns(at_desk: Any, one_group: Any) -> None:
    async def work(desk: Any) -> tuple[GroupMeta, dict[str, list[Any]]]:
        group = await one_group(desk)
        return group, await desk.plane.read("train", group.keys, COLUMNS)

    group, columns = at_desk(work)
    assert group.keys == ("v0_p0_g0", "v0_p0_g1", "v0_p0_g2", "v0_p0_g3")
    assert dict(group.tags) == {
        "group": 0,
        "prompt": 0,
        "dataset": "fake",
        "version": 0,
        "end_version": 0,
        "prompt_tokens": 2,
        "response_tokens": [2, 2, 2, 2],
        "trainable_tokens": [2, 2, 2, 2],
        "reward": [0.0, 1.0, 0.0, 1.0],
        "status": ["finished"] * 4,
        "cause": [None] * 4,
        "distinct_responses": 4,
    }
    encode = CharTokenizer().encode
    assert [row.tolist() for row in columns[TOKENS]] == [[*encode("0>"), *encode(str(i)), 1] for i in range(4)]
    assert all(row.dtype == torch.float32 and row.tolist() == [-1.0, -1.0] for row in columns[LOGPROBS])


class SaysItOddly(FakeGenerator):
    """Answers with tokens that no tokenizer would make of their text: `3` is one token, and so is the end."""

    response = (CharTokenizer.eos_id, 5, CharTokenizer.eos_id, CharTokenizer.eos_id)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        size = len(self.response)
        return [Completion(self.response, (-1.0,) * size, ((0, 0, size),), True) for _ in request.seeds]


def test_what_is_stored_are_the_tokens_that_were_sampled_and_never_their_text_encoded_again(
    at_desk: Any, one_group: Any
) -> None:
    """CASE-G7: tokens whose text encodes to others; as many log-probabilities as tokens."""

    async def work(desk: Any) -> Any:
        return await desk.plane.read("train", (await one_group(desk)).keys, COLUMNS)

    made = SaysItOddly.response
    assert CharTokenizer().encode(CharTokenizer().decode(list(made))) != list(made)
    columns = at_desk(work, generator=SaysItOddly())
    assert {tuple(row.tolist()) for row in columns[TOKENS]} == {(*CharTokenizer().encode("0>"), *made)}
    assert {len(row) for row in columns[LOGPROBS]} == {len(made)}


def test_stopping_leaves_nothing_running_and_nothing_half_put(at_desk: Any, grant: Any) -> None:
    async def work(desk: Any) -> None:
        await desk.collector.grant([grant(0), grant(1)])
        await anyio.sleep(0.5)
        assert (await desk.collector.status())["running"] == 2
        await desk.collector.stop()
        status = await desk.collector.status()
        assert (status["running"], status["in_flight"]) == (0, 0)
        assert await desk.plane.keys("train") == []

    at_desk(work)
