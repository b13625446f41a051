"""Known conversations: the ids, places, spans, log-probabilities and rewards at the trainer, written by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.collector import sample_seed
from asyncrl.collectors.engines.base import Request, Result
from asyncrl.collectors.environments.base import Environment, Step, Turn
from asyncrl.collectors.environments.builtin.calculator import Calculator, calculate
from asyncrl.collectors.environments.builtin.guess import Guess
from asyncrl.collectors.environments.builtin.reasoning_gym import SecondChance
from asyncrl.collectors.environments.conversation import turn_seed
from asyncrl.collectors.environments.tools import Call, Tool, read_calls
from asyncrl.collectors.environments.transcript import HistoryMismatch, Transcript
from asyncrl.engine.loop.selection import select
from asyncrl.engine.records import GroupMeta, MicroBatch, Prompt
from asyncrl.engine.records.columns import LOGPROBS, TOKENS
from asyncrl.engine.records.work import TrainWork
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.filters import Chain, FilterContext
from asyncrl.trainers.backends.trained import trained_flags
from asyncrl.trainers.rank import rows_of

SECRET = Prompt(7, "9>", "3", "guess")
PROMPT = [11, 31]
"""`9>`: digits are tokens 2 to 11, letters 12 to 30, `>` is 31, and 1 ends a turn."""


def ids(row: torch.Tensor) -> list[int]:
    return [int(token) for token in row]


def guesses(first: dict[int, int]) -> Callable[[Request], Sequence[int]]:
    """Say a digit by the seed of the first turn; after `l>` 3, after `h>` 9."""

    def say(request: Request) -> Sequence[int]:
        if len(request.prompt_ids) == 2:
            return [2 + first[request.seed], 1]
        return [2 + (3 if request.prompt_ids[-2] == 23 else 9), 1]

    return say


def trained(group: GroupMeta, columns: dict[str, list[Any]], **options: Any) -> tuple[Any, list[int]]:
    """Return what is selected of a group, and a backend's flags over the responses selected, one after the other."""
    (judgement,) = Chain([]).judge(
        [group], FilterContext(trainer_version=group.group_tag("end_version"), step=0, seed=0)
    )
    selection = select([judgement], simulated_config(**options), trainer_version=group.group_tag("end_version"))
    keys = tuple(selection.samples)
    batch = MicroBatch(keys, 0)
    work = TrainWork(1, (batch,), selection.samples, selection.trained_tokens)
    values = {name: [rows[group.keys.index(key)] for key in keys] for name, rows in columns.items()}
    return selection, trained_flags(rows_of(work, batch, values)).int().tolist()


def test_a_group_of_guesses_reaches_the_trainer_token_by_token(table: Any) -> None:
    """Secret 3. Sample 0 says 5, hears `l>`, says 3. Sample 1 says 1, hears `h>`, says 9, hears `l>`, says 3.

    Sample 2 is right at once.
    """
    first = {sample_seed(3, 0, i): digit for i, digit in enumerate((5, 1, 3))}
    group, columns = table(Guess(), guesses(first), lambda at: at.group(SECRET, size=3), size=3)
    low, high = [23, 31], [19, 31]
    assert [ids(row) for row in columns[TOKENS]] == [
        [*PROMPT, 7, 1, *low, 5, 1],
        [*PROMPT, 3, 1, *high, 11, 1, *low, 5, 1],
        [*PROMPT, 5, 1],
    ]
    assert group.tags["generated"] == ["0:2,4:6", "0:2,4:6,8:10", "0:2"]
    assert group.tags["response_tokens"] == [6, 10, 2]
    assert group.tags["trainable_tokens"] == [4, 6, 2]
    assert group.rewards == pytest.approx((1 / 2, 1 / 3, 1.0))
    assert group.statuses == ("finished",) * 3
    assert "spans" not in group.tags
    p = pytest.approx(-0.1)
    assert [row.tolist() for row in columns[LOGPROBS]] == [[p, p, 0, 0, p, p], [p, p, 0, 0, p, p, 0, 0, p, p], [p, p]]
    selection, flags = trained(group, columns)
    assert [sample.response_tokens for sample in selection.samples.values()] == [4, 6, 2]
    assert flags == [1, 1, 0, 0, 1, 1, *(1, 1, 0, 0, 1, 1, 0, 0, 1, 1), 1, 1]


def test_a_second_chance_reaches_the_trainer_token_by_token(table: Any, chat_ml: Any) -> None:
    """The answer is 42. The model says 41, hears that it is wrong, and says 42: half of the reward."""

    def say(request: Request) -> Sequence[int]:
        return [*chat_ml.encode("42" if "Wrong" in chat_ml.decode(list(request.prompt_ids)) else "41"), 2]

    environment = SecondChance({"any": None}, reply="Wrong.")
    group, columns = table(environment, say, lambda at: at.group(Prompt("any:0", "Q", "42", "any")), tokenizer=chat_ml)
    wrong = [1, *(10 + ord(c) for c in "user\nWrong."), 2, 20, 1, *(10 + ord(c) for c in "assistant\n")]
    assert ids(columns[TOKENS][0]) == [10 + ord("Q"), 62, 59, 2, 20, *wrong, 62, 60, 2]
    n = 3 + 1 + len(wrong)
    assert group.tags["generated"] == [f"0:3,{n}:{n + 3}"]
    assert group.rewards == (0.5,)
    p = pytest.approx(-0.1)
    assert columns[LOGPROBS][0].tolist() == [p] * 3 + [0.0] * (1 + len(wrong)) + [p] * 3


def test_replies_have_the_version_of_the_turn_before_and_are_withheld_with_it(table: Any, state: Any) -> None:
    """New weights between two turns: in mode `tokens` at bound 0 only the second is trained."""

    class Slow(Guess):
        generator: Any = None
        updated = False

        async def step(self, state_: Any, turn: Turn) -> Step:
            if not turn.number and not self.updated:
                self.updated = True
                await self.generator.update_weights(1, state)
            await anyio.sleep(1.0)
            return await super().step(state_, turn)

    environment = Slow()

    async def work(at: Any) -> Any:
        environment.generator = at.generator
        return await at.group(SECRET, size=2)

    first = {sample_seed(3, 0, i): 5 for i in range(2)}
    group, columns = table(environment, guesses(first), work, size=2)
    assert group.tags["spans"] == ["0:0,1:4"] * 2
    p, q = pytest.approx(-0.1), pytest.approx(-0.2)
    assert columns[LOGPROBS][0].tolist() == [p, p, 0, 0, q, q]
    selection, flags = trained(
        group.stamp(reward=[0.0, 1.0]), columns, rollout__stale_mode="tokens", rollout__max_staleness=0
    )
    sample = selection.samples["v0_p0_g0"]
    assert (sample.withheld, sample.response_tokens, sample.generated) == (4, 2, "0:2,4:6")
    assert flags == [0, 0, 0, 0, 1, 1] * 2


def test_each_turn_is_asked_with_what_was_said_and_a_seed_of_its_own(table: Any) -> None:
    """G7: the second request begins with the very ids of the first and of its answer."""

    async def work(at: Any) -> Any:
        await at.group(SECRET)
        return at.asked

    seed = sample_seed(3, 0, 0)
    one, two = table(Guess(), guesses({seed: 5}), work)
    assert (one.prompt_ids, one.seed) == (tuple(PROMPT), seed)
    assert two.prompt_ids == (*PROMPT, 7, 1, 23, 31)
    assert two.seed == turn_seed(seed, 1) not in {seed, turn_seed(seed, 2)}
    assert one.group != two.group


def test_the_samples_of_a_group_meet_one_world(table: Any) -> None:
    seeds: list[int] = []

    class Worlds(Guess):
        async def reset(self, prompt: Prompt, seed: int) -> int:
            seeds.append(seed)
            return await super().reset(prompt, seed)

    table(Worlds(), lambda _: [5, 1], lambda at: at.group(SECRET, size=3), size=3)
    assert len(seeds) == 3
    assert len(set(seeds)) == 1


def test_ids_that_were_sampled_stay_though_their_text_has_others(table: Any, chat_ml: Any) -> None:
    """G7: `ab` is one token of the tokenizer, and the model sampled two."""

    class Merging(type(chat_ml)):  # type: ignore[misc]
        def encode_more(self, text: str) -> list[int]:
            return [t for part in text.split("ab") for t in (299, *super(Merging, self).encode(part))][1:]

    class Twice(Environment):
        async def step(self, state: Any, turn: Turn) -> Step:
            return Step("ab", done=turn.number == 1)

    sampled = [10 + ord("a"), 10 + ord("b"), 2]
    _, columns = table(Twice(), lambda _: sampled, lambda at: at.group(Prompt(0, "?", "", "mine")), tokenizer=Merging())
    reply = [10, 1, *chat_ml.encode("user\n"), 299, 2, *chat_ml.encode("\n<|im_start|>assistant\n")]
    assert ids(columns[TOKENS][0])[: 1 + len(sampled)] == [10 + ord("?"), *sampled]
    assert ids(columns[TOKENS][0])[-3:] == sampled
    assert ids(columns[TOKENS][0])[4:-3] == [10 + ord("\n"), *reply[1:]]


def test_a_turn_that_was_made_from_another_history_is_refused() -> None:
    transcript = Transcript([5, 6])
    transcript.generated((5, 6), Result((7,), (-0.5,), ((0, 0, 1),), "stop"))
    with pytest.raises(HistoryMismatch, match="from 3 tokens, and its history has 3; they differ from token 1 on"):
        transcript.generated((5, 9, 7), Result((8,), (-0.5,), ((0, 0, 1),), "stop"))


def test_a_calculation_reaches_the_trainer_token_by_token(table: Any, chat_ml: Any) -> None:
    """One call, one call that is not JSON, and the answer; the end of a turn is not written twice."""
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>'
    said = [call, "<tool_call>six</tool_call>", "It is 42."]

    def say(request: Request) -> Sequence[int]:
        turn = chat_ml.decode(list(request.prompt_ids)).count("<tool_response>")
        return [*chat_ml.encode(said[turn]), 2]

    def reply(text: str) -> list[int]:
        written = f"\n<|im_start|>user\n<tool_response>{text}</tool_response><|im_end|>\n<|im_start|>assistant\n"
        return list(chat_ml.encode(written))

    group, columns = table(
        Calculator(),
        say,
        lambda at: at.group(Prompt(0, "Q", "42", "calculator")),
        tokenizer=chat_ml,
        max_tokens=900,
        taggers={"made": len},
    )
    turns = [[*chat_ml.encode(text), 2] for text in said]
    error = "Error: the call is not JSON: Expecting value: line 1 column 1 (char 0)"
    between = [reply("42"), reply(error)]
    assert ids(columns[TOKENS][0]) == [10 + ord("Q"), *turns[0], *between[0], *turns[1], *between[1], *turns[2]]
    a, b, c, d = (len(part) for part in (turns[0], between[0], turns[1], between[1]))
    last = (a + b + c + d, a + b + c + d + len(turns[2]))
    assert group.tags["generated"] == [f"0:{a},{a + b}:{a + b + c},{last[0]}:{last[1]}"]
    assert group.tags["made"] == group.tags["trainable_tokens"] == [sum(map(len, turns))]
    assert group.rewards == (1.0,)
    logprobs = columns[LOGPROBS][0]
    assert logprobs[a : a + b].tolist() == [0.0] * b
    assert bool((logprobs[:a] < 0).all())


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [({"max_turns": 1}, 2), ({"max_tokens": 4}, 2), ({"max_tokens": 5}, 5), ({"max_turn_tokens": 1}, 1)],
)
def test_a_limit_ends_a_sample_as_truncated_with_the_rewards_so_far(
    table: Any, limits: dict[str, int], tokens: int
) -> None:
    """A reply that leaves no token for a turn is not put; a turn that was cut is the last."""

    class Endless(Environment):
        async def step(self, state: Any, turn: Turn) -> Step:
            return Step("h>", reward=0.25, parts={"said": 1.0})

    group, columns = table(Endless(), lambda _: [4, 1], lambda at: at.group(SECRET), **limits)
    assert group.tags["response_tokens"] == [tokens]
    assert group.statuses == ("truncated",)
    assert group.rewards == (0.25 * (1 + (tokens == 5)),)
    assert group.tags["said"] == [1.0 + (tokens == 5)]
    assert len(columns[LOGPROBS][0]) == tokens


def test_what_user_code_raises_fails_its_sample_alone(table: Any) -> None:
    class Moody(Guess):
        async def step(self, state: Any, turn: Turn) -> Step:
            if turn.text == "5":
                raise SystemExit("no more")
            if turn.text == "6":
                return "higher"  # type: ignore[return-value]
            if turn.text == "7":
                return Step()
            if turn.text == "8":
                return Step("no such characters")
            if turn.text == "4":
                return Step(done=True, parts=[0.5])  # type: ignore[arg-type]
            return await super().step(state, turn)

    first = {sample_seed(3, 0, i): digit for i, digit in enumerate((5, 6, 7, 8, 4, 3))}
    group, _ = table(Moody(), guesses(first), lambda at: at.group(SECRET, size=6), size=6)
    assert group.tags["cause"] == ["environment_error"] * 5 + [None]
    assert group.tags["response_tokens"] == [0, 0, 0, 0, 0, 2]
    assert group.rewards == (None, None, None, None, None, 1.0)
    assert "generated" not in group.tags


def test_a_step_that_takes_too_long_and_a_part_named_as_a_tag_fail_the_sample(table: Any) -> None:
    class Late(Environment):
        async def step(self, state: Any, turn: Turn) -> Step:
            await anyio.sleep(31.0)
            return Step(done=True)

    class Taken(Environment):
        async def step(self, state: Any, turn: Turn) -> Step:
            return Step(done=True, parts={"made": 1.0})

    failure, _ = table(Late(), lambda _: [4, 1], lambda at: at.group(SECRET))
    assert failure.reason == "environment_timeout"
    assert "step took longer than 30 s (environment.step_timeout_s)" in failure.error
    failure, _ = table(Taken(), lambda _: [4, 1], lambda at: at.group(SECRET), taggers={"made": len})
    assert "a tagger gives a tag of that name" in failure.error


async def _broken(state: Any, kind: str) -> str:
    if kind == "slow":
        await anyio.sleep_forever()
    if kind == "odd":
        return 7  # type: ignore[return-value]
    raise RuntimeError("no disk")


class Broken(Environment):
    """Its tool fails; it is content with any answer."""

    tools = (Tool("try", "Fail.", {"type": "object", "properties": {"kind": {}}, "required": ["kind"]}, _broken),)

    async def step(self, state: Any, turn: Turn) -> Step:
        return Step(done=True, reward=1.0)


CALLS = [
    ('{"name": "try", "arguments": {"kind": "x"}}', "tool_error", "tool try raised RuntimeError('no disk')"),
    ('{"name": "try", "arguments": {"kind": "slow"}}', "tool_timeout", "tool try took longer than 5 s"),
    ('{"name": "try", "arguments": {"kind": "odd"}}', "tool_error", "tool try returned int; it must return a text"),
    ('{"name": "try", "arguments": {}}', "tool_error", "try needs the argument 'kind'"),
    ('{"name": "try", "arguments": {"kind": 1, "a": 2}}', "tool_error", "try has no argument 'a'"),
    ('{"name": "tyr", "arguments": {}}', "tool_error", "there is no tool 'tyr'; there are try"),
    ('["try"]', "tool_error", "the call must be an object"),
]


@pytest.mark.parametrize(("call", "cause", "what"), CALLS)
def test_a_tools_error_is_fed_back_or_fails_the_sample(
    table: Any, chat_ml: Any, call: str, cause: str, what: str
) -> None:
    def say(request: Request) -> Sequence[int]:
        called = "<tool_response>" in chat_ml.decode(list(request.prompt_ids))
        return [*chat_ml.encode("well" if called else f"<tool_call>{call}</tool_call>"), 2]

    async def work(at: Any) -> Any:
        found = await at.group(Prompt(0, "Q", "", "mine"))
        return found, at.asked

    (group, _), asked = table(Broken(), say, work, tokenizer=chat_ml, max_tokens=900)
    assert group.rewards == (1.0,)
    assert f"Error: {what}" in chat_ml.decode(list(asked[1].prompt_ids))
    (failure, _), _ = table(Broken(), say, work, tokenizer=chat_ml, max_tokens=900, on_tool_error="fail")
    assert failure.reason == cause
    assert what in failure.error


@pytest.mark.parametrize(
    "expression", ["9**9", "__import__('os')", "a + 1", "(1", "True + 1", "1 if 2 else 3", "1e400"]
)
def test_the_calculator_reads_numbers_and_no_code(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        calculate(expression)
    assert calculate("-(12 + 7) * 3 / 2 // 1 % 5") == -(12 + 7) * 3 / 2 // 1 % 5


def test_calls_are_read_behind_the_reasoning_and_without_their_end() -> None:
    text = '<think><tool_call>{"name": "try"}</tool_call></think><tool_call>{"name": "try", "arguments": {"kind": 1}}'
    assert read_calls(text, Broken.tools) == [Call("try", {"kind": 1})]
    (deep,) = read_calls("<tool_call>" + "[" * 100_000, Broken.tools)
    assert "the call is not JSON" in deep.fault
