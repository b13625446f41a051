"""The collector: granted groups in, whole scored groups out to the data plane.

Invariants: a granted group ends in exactly one message, a put notice or a failure; its version
is the one served when the grant was accepted, whatever is loaded while it generates; the
version never goes backwards.
"""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import structlog
import torch

from asyncrl.collectors.extras import check_extras, extra_columns
from asyncrl.collectors.generators.base import Completion, Generator, GroupRequest
from asyncrl.collectors.tasks import Reward, Task
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import AsyncRLError, StoreFull, VersionError
from asyncrl.engine.model.tokenizer import Tokenizer
from asyncrl.engine.offload import Offload
from asyncrl.engine.outbox import Numbered, Outbox
from asyncrl.engine.records import Grant, GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.columns import LOGPROBS, TOKENS
from asyncrl.engine.records.fate import CANCELLED
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.message import GroupFailure, PutNotice, Served
from asyncrl.engine.records.spans import SPANS, write_spans
from asyncrl.engine.weights.base import WeightTransport
from asyncrl.filters.taggers import Tagger

log = structlog.get_logger()

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0


def sample_seed(seed: int, group: int, index: int) -> int:
    """Return the seed of one sample, a function of run seed, group and index alone."""
    return int(np.random.SeedSequence((seed, group, index)).generate_state(1, np.uint64)[0])


class ScoringFailed(AsyncRLError, RuntimeError):
    """No sample of a group could be scored; the first error is its cause."""


class BadLogprobs(AsyncRLError, ValueError):
    """A completion lacks a finite log-probability for each of its tokens."""


class Collector:
    """One generator's worth of collection. `run` owns everything that `grant` starts."""

    def __init__(
        self,
        name: str,
        *,
        generator: Generator,
        task: Task,
        tokenizer: Tokenizer,
        plane: DataPlane,
        partition: str,
        transport: WeightTransport,
        offload: Offload[Any],
        temperature: float,
        max_new_tokens: int,
        group_timeout_s: float,
        put_timeout_s: float,
        taggers: Mapping[str, Tagger] | None = None,
    ) -> None:
        self.name = name
        self._generator = generator
        self._task = task
        self._tokenizer = tokenizer
        self._plane = plane
        self._partition = partition
        self._transport = transport
        self._offload = offload
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._group_timeout_s = group_timeout_s
        self._put_timeout_s = put_timeout_s
        self._taggers = dict(taggers or {})
        self._version = 0
        self._outbox = Outbox()
        self._send, self._grants = anyio.create_memory_object_stream[tuple[Sequence[Grant], int]](float("inf"))
        self._in_flight: dict[int, int] = {}
        self._generating: dict[int, anyio.CancelScope] = {}
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self) -> None:
        """Serve grants until `stop`; what goes wrong here ends the conversation with its error."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._generator.run)
                    async for grants, version in self._grants:
                        # Together, so that the generator finds all of them when it forms a batch.
                        for grant in grants:
                            tasks.start_soon(self._collect, grant, version)
        except Exception as error:  # The actor's edge: the controller hears it at its next poll.
            self._outbox.fail(error)
            raise
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """End `run`; a put under way cleans up after itself. Returns when nothing runs any more."""
        self._scope.cancel()
        await self._ended.wait()

    async def grant(self, grants: Sequence[Grant]) -> None:
        """Accept groups; each is stamped now with the version that the generator serves."""
        self._in_flight.update((grant.group, self._version) for grant in grants)
        self._send.send_nowait((grants, self._version))

    async def update_weights(self, version: int, handle: Any) -> None:
        """Load a version whole, then serve it: groups granted from now on carry it.

        VersionError for a version older than the one served; on any error the old one stays.
        """
        if version < self._version:
            raise VersionError(f"{self.name} serves version {self._version} and was given {version}")
        await self._generator.update_weights(version, await self._transport.receive(handle))
        self.set_weight_version(version)

    def set_weight_version(self, version: int) -> None:
        """Serve `version`; VersionError if it is older than the one served."""
        if version < self._version:
            raise VersionError(f"{self.name} serves version {self._version}; it cannot go back to {version}")
        self._version = version
        self._outbox.post(Served(version))

    async def cancel(self, groups: Sequence[int]) -> None:
        """Give up groups that still generate or are scored; each ends in a failure `cancelled_stale`."""
        for group in groups:
            if group in self._generating:
                self._generating[group].cancel()

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        """Return messages numbered above `after_seq`, waiting up to `wait_s`; raises the actor's own error."""
        return await self._outbox.after(after_seq, wait_s)

    async def status(self) -> dict[str, Any]:
        return {**self._generator.stats(), "version": self._version, "in_flight": len(self._in_flight)}

    async def _collect(self, grant: Grant, version: int) -> None:
        """Bring one grant to its one message, a put notice or a failure."""
        started = anyio.current_time()
        try:
            rolled = await self._attempt(grant, version)
            if isinstance(rolled, GroupFailure):
                log.warning("group failed", group=grant.group, reason=rolled.reason)
                self._outbox.post(rolled)
            else:
                group, columns = rolled
                await self._put(group, columns)
                self._outbox.post(PutNotice(group, round(anyio.current_time() - started, 6)))
        finally:
            del self._in_flight[grant.group]

    async def _attempt(
        self, grant: Grant, version: int
    ) -> tuple[GroupMeta, dict[str, list[torch.Tensor]]] | GroupFailure:
        """Roll a group out; whatever goes wrong is the group's failure, with its traceback."""
        with anyio.CancelScope() as scope:
            self._generating[grant.group] = scope
            try:
                with anyio.move_on_after(self._group_timeout_s):
                    return await self._rollout(grant, version)
                limit = f"group {grant.group} took longer than {self._group_timeout_s:g} s"
                return GroupFailure(grant.group, "timeout", limit)
            except Exception as caught:  # The group's edge: counted as a failure.
                reason = "score_error" if isinstance(caught, ScoringFailed) else "generation_error"
                return GroupFailure(grant.group, reason, "".join(traceback.format_exception(caught)))
            finally:
                del self._generating[grant.group]
        return GroupFailure(grant.group, CANCELLED, "no batch to come could train it")

    async def _rollout(self, grant: Grant, version: int) -> tuple[GroupMeta, dict[str, list[torch.Tensor]]]:
        """Generate, score and flatten one group."""
        prompt_ids = tuple(self._tokenizer.encode(grant.prompt.text))
        completions = await self._generator.generate(
            GroupRequest(
                prompt_ids=prompt_ids,
                seeds=tuple(sample_seed(grant.seed, grant.group, i) for i in range(grant.size)),
                max_new_tokens=self._max_new_tokens,
                temperature=self._temperature,
            )
        )
        outcomes = [
            BadLogprobs(completion.fault) if completion.fault else outcome
            for completion, outcome in zip(completions, await self._score(grant, completions), strict=True)
        ]
        first = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
        if first is not None and not any(isinstance(outcome, Reward) for outcome in outcomes):
            if isinstance(first, BadLogprobs):
                raise first
            raise ScoringFailed(f"all {grant.size} samples of group {grant.group} failed to score") from first
        statuses, causes = [], []
        for completion, outcome in zip(completions, outcomes, strict=True):
            scored = isinstance(outcome, Reward)
            ended = tag.FINISHED if completion.finished else tag.TRUNCATED
            statuses.append(ended if scored else tag.FAILED)
            cause = "bad_logprobs" if isinstance(outcome, BadLogprobs) else "score_error"
            causes.append(None if scored else cause)
            if isinstance(outcome, Exception):
                log.warning("sample failed", group=grant.group, cause=cause, error=repr(outcome))
        # A failed sample keeps its place and its key, and has no response: nothing of it can be trained.
        kept = [
            c if status != tag.FAILED else Completion((), (), (), False)
            for c, status in zip(completions, statuses, strict=True)
        ]
        lengths = [len(completion.token_ids) for completion in kept]
        oldest = min((span[0] for c in kept for span in c.spans), default=version)
        newest = max((span[0] for c in kept for span in c.spans), default=version)
        stamped = min(version, oldest)
        tags = {
            tag.GROUP: grant.group,
            tag.PROMPT: grant.prompt.id,
            tag.DATASET: grant.prompt.dataset,
            tag.VERSION: stamped,
            tag.END_VERSION: newest,
            tag.PROMPT_TOKENS: len(prompt_ids),
            tag.RESPONSE_TOKENS: lengths,
            tag.TRAINABLE_TOKENS: lengths,
            tag.REWARD: [o.value if isinstance(o, Reward) else None for o in outcomes],
            tag.STATUS: statuses,
            tag.CAUSE: causes,
            tag.DISTINCT_RESPONSES: len({tuple(completion.token_ids) for completion in completions}),
            **_parts(outcomes),
            **{name: [tagger(c.token_ids) for c in kept] for name, tagger in self._taggers.items()},
        }
        if any(len(completion.spans) > 1 for completion in kept) or newest != oldest:
            tags[SPANS] = [write_spans(completion.spans) for completion in kept]
        columns = {
            TOKENS: [torch.tensor([*prompt_ids, *c.token_ids], dtype=torch.int32) for c in kept],
            LOGPROBS: [torch.tensor(c.logprobs, dtype=torch.float32) for c in kept],
            **extra_columns(outcomes, self._task.extras),
        }
        return GroupMeta(sample_keys(stamped, grant.group, grant.size), tags), columns

    async def _score(self, grant: Grant, completions: Sequence[Completion]) -> list[Reward | Exception]:
        """Score all samples; an error stays with its sample."""
        responses = [self._tokenizer.decode(list(completion.token_ids)) for completion in completions]
        if inspect.iscoroutinefunction(self._task.score):
            scored: list[Reward | Exception] = [Reward(0.0)] * len(responses)

            async def score_one(i: int) -> None:
                scored[i] = await _scored_async(self._task, grant, responses[i])

            async with anyio.create_task_group() as tasks:
                for i in range(len(responses)):
                    tasks.start_soon(score_one, i)
            return scored
        outcomes: list[Reward | Exception] = await self._offload(
            lambda: [_scored(self._task, grant, response) for response in responses]
        )
        return outcomes

    async def _put(self, group: GroupMeta, columns: dict[str, list[torch.Tensor]]) -> None:
        """Write the group; a full store is tried again, with growing pauses, until the deadline."""
        pause = _FIRST_RETRY_S
        refusal = StoreFull(f"{group.row} found no room within {self._put_timeout_s:g} s")
        with anyio.move_on_after(self._put_timeout_s):
            while True:
                try:
                    return await self._plane.put(self._partition, group, columns)
                except StoreFull as error:
                    refusal = error
                await anyio.sleep(pause)
                pause = min(2 * pause, _LAST_RETRY_S)
        raise refusal


def _as_reward(task: Task, outcome: Any) -> Reward:
    """Return a reward of plain floats, which every log can write, whatever numbers the task gave."""
    reward = outcome if isinstance(outcome, Reward) else Reward(float(outcome))
    check_extras(reward, task.extras)
    parts = {name: float(part) for name, part in reward.parts.items()}
    return Reward(float(reward.value), parts, reward.extras)


def _scored(task: Task, grant: Grant, response: str) -> Reward | Exception:
    try:
        return _as_reward(task, task.score(grant.prompt, response))
    except Exception as error:  # A user's code: the sample has failed, its siblings go on.
        return error


async def _scored_async(task: Any, grant: Grant, response: str) -> Reward | Exception:
    try:
        return _as_reward(task, await task.score(grant.prompt, response))
    except Exception as error:  # A user's code: the sample has failed, its siblings go on.
        return error


def _parts(outcomes: Sequence[Reward | Exception]) -> dict[str, list[float | None]]:
    """Return the named parts of rewards as per-sample tags; None where a sample lacks one."""
    names = sorted({name for o in outcomes if isinstance(o, Reward) for name in o.parts})
    return {name: [o.parts.get(name) if isinstance(o, Reward) else None for o in outcomes] for name in names}
