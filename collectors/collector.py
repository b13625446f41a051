"""The collector: takes dispatched groups, and writes whole scored groups to the data plane.

Invariants: a group ends in exactly one message, a put notice or a failure; its version is the one that was served when
the grant was accepted, even if another is loaded while it generates; the version never goes backwards.
"""

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import structlog
from anyio.lowlevel import checkpoint_if_cancelled

from asyncrl.collectors.engine_meter import EngineMeter
from asyncrl.collectors.engines.base import Cache
from asyncrl.collectors.extras import Kind, common_kinds, odd_extra
from asyncrl.collectors.flat import Columns, GroupFailed, flatten
from asyncrl.collectors.generators.base import Completion, Generator, GroupRequest
from asyncrl.collectors.outcome import BAD_LOGPROBS, SCORE_ERROR, UNTRAINABLE, Outcome, SampleFailure, StandIn
from asyncrl.collectors.patience import Patience
from asyncrl.collectors.scoring import Scorer
from asyncrl.collectors.tasks import Response, Reward
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.outbox import Numbered, Outbox
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import EngineDied, StoreFull, VersionError
from asyncrl.engine.model.tokenizer import Tokenizer
from asyncrl.engine.records import Grant, GroupMeta
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.records.fate import CANCELLED, QUEUE_TIMEOUT
from asyncrl.engine.records.message import GroupFailure, PutNotice, Served
from asyncrl.engine.records.traffic import Traffic
from asyncrl.engine.weights.base import Loaded, Offer, WeightTransport
from asyncrl.engine.weights.twins import with_twins
from asyncrl.filters.taggers import Tagger

log = structlog.get_logger()

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0


def sample_seed(seed: int, group: int, index: int) -> int:
    """Return the seed of one sample, which depends only on run seed, group and index."""
    return int(np.random.SeedSequence((seed, group, index)).generate_state(1, np.uint64)[0])


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """Where a collector puts its groups, how it samples, and the seconds that a group may take.

    A group may wait `queue_timeout_s` for its turn to decode, decode for `group_timeout_s`, and look for room in
    the data plane for `put_timeout_s`. `oversample` samples per group are begun to be aborted when the others ended.
    `reward_on_failure` is the reward of a sample whose score failed; None: it fails.
    """

    partition: str
    temperature: float
    max_new_tokens: int
    queue_timeout_s: float
    group_timeout_s: float
    put_timeout_s: float
    oversample: int = 0
    reward_on_failure: float | None = None

    @classmethod
    def of(cls, config: RunConfig, partition: str) -> "CollectorSettings":
        """Return the settings of a run's configuration."""
        return cls(
            partition,
            config.rollout.temperature,
            config.rollout.max_new_tokens,
            config.queue_timeout_s,
            config.collector.group_timeout_s,
            config.collector.put_timeout_s,
            config.rollout.oversample,
            config.reward.on_failure,
        )


@dataclass(frozen=True, slots=True)
class _Granted:
    """A grant, the version of its stamp, its prompt's tokens or what was wrong with it, and who came with it."""

    grant: Grant
    version: int
    prompt: tuple[int, ...] | Exception
    batch: int
    peers: int


Rolled = tuple[GroupMeta, Columns, tuple[str, ...]]
"""A group's tags and columns, and the errors of its failed samples, without duplicates."""


class Collector:
    """One generator's worth of collection. `run` owns everything that `grant` starts."""

    def __init__(
        self,
        name: str,
        settings: CollectorSettings,
        *,
        generator: Generator,
        scorer: Scorer,
        tokenizer: Tokenizer,
        plane: DataPlane,
        transport: WeightTransport,
        taggers: Mapping[str, Tagger] | None = None,
    ) -> None:
        self.name = name
        self._settings = settings
        self._generator = generator
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._plane = plane
        self._transport = transport
        self._taggers = dict(taggers or {})
        self._version = 0
        self._loaded: int | None = None
        self._loading = anyio.Lock(fast_acquire=True)
        self._outbox = Outbox()
        self._send, self._grants = anyio.create_memory_object_stream[tuple[Sequence[Grant], int]](float("inf"))
        self._in_flight: dict[int, int] = {}
        self._generating: dict[int, anyio.CancelScope] = {}
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._extra_kinds: dict[str, Kind] = {}
        self._meter = EngineMeter(generator)
        self._patience = Patience()
        self._traffic = Traffic()

    async def run(self) -> None:
        """Serve grants until `stop`; an error here is raised by the controller's next poll."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._generator.run)
                    async for grants, version in self._grants:
                        await self._meter.begin()
                        # Before any begins: groups granted together decode together, and must know how many they are.
                        prompts = [self._encode(grant) for grant in grants]
                        peers = sum(isinstance(ids, tuple) for ids in prompts)
                        for grant, ids in zip(grants, prompts, strict=True):
                            tasks.start_soon(self._collect, _Granted(grant, version, ids, grants[0].group, peers))
        except Exception as error:  # The actor's edge: the controller hears it at its next poll.
            self._outbox.fail(error)
            raise
        finally:
            self._scorer.close()
            self._ended.set()

    async def stop(self) -> None:
        """End `run`, and return when nothing runs any more; an unfinished put removes its remains."""
        self._scope.cancel()
        await self._ended.wait()

    async def grant(self, grants: Sequence[Grant]) -> None:
        """Accept groups; each is stamped now with the version that the generator serves."""
        self._in_flight.update((grant.group, self._version) for grant in grants)
        self._send.send_nowait((grants, self._version))

    async def update_weights(self, version: int, offer: Offer) -> Loaded | None:
        """Load a version whole, then serve it: groups granted from now on carry it. Return what it took.

        A call for the version that is being loaded waits for that load, and one for the version served returns at
        once: a caller that gave up did not end its call. VersionError for a version older than the one served;
        on any error the old one stays.
        """
        async with self._loading:
            if version == self._loaded:
                return None
            if version < self._version:
                raise VersionError(f"{self.name} serves version {self._version} and was given {version}")
            started = anyio.current_time()
            state = with_twins(await self._transport.receive(offer), offer.twins)
            received = anyio.current_time()
            took = await self._generator.update_weights(version, state)
            self.set_weight_version(version)
            return Loaded.of(received - started, took)

    def set_weight_version(self, version: int) -> None:
        """Serve `version`; VersionError if it is older than the one served."""
        if version < self._version:
            raise VersionError(f"{self.name} serves version {self._version}; it cannot go back to {version}")
        self._version = self._loaded = version
        self._outbox.post(Served(version))

    async def sleep(self, cache: Cache) -> None:
        """Leave the device to others; what generates stands still, and so does the time that it may take."""
        await self._generator.sleep(cache)
        self._patience.stop()

    async def wake(self) -> None:
        """Come back to the device, and go on."""
        await self._generator.wake()
        self._patience.go_on()

    async def cancel(self, groups: Sequence[int]) -> None:
        """Give up groups that still generate or are scored; each ends in a failure `cancelled_stale`."""
        for group in groups:
            if group in self._generating:
                self._generating[group].cancel()

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        """Return messages numbered above `after_seq`, waiting up to `wait_s`; raises the actor's own error."""
        return await self._outbox.after(after_seq, wait_s)

    async def status(self) -> dict[str, Any]:
        return {**await self._generator.stats(), "version": self._version, "in_flight": len(self._in_flight)}

    def _encode(self, grant: Grant) -> tuple[int, ...] | Exception:
        try:
            return tuple(self._tokenizer.encode(grant.prompt.text))
        except Exception as error:  # The group's edge: its failure, when its turn comes.
            return error

    async def _collect(self, granted: _Granted) -> None:
        """Bring one grant to its one message, a put notice or a failure."""
        started, grant = anyio.current_time(), granted.grant
        try:
            rolled = await self._attempt(granted)
            if isinstance(rolled, GroupFailure):
                if rolled.reason != CANCELLED:  # The controller asked for that, and says why.
                    log.warning("group failed", group=grant.group, reason=rolled.reason)
                self._outbox.post(rolled)
            else:
                group, columns, errors = rolled
                use = await self._meter.read()
                stored = await self._put(group, columns)
                seconds = round(anyio.current_time() - started, 6)
                self._outbox.post(PutNotice(stored, seconds, errors, use, self._new_traffic()))
        finally:
            del self._in_flight[grant.group]

    async def _attempt(self, granted: _Granted) -> Rolled | GroupFailure:
        """Roll a group out; whatever goes wrong is the group's failure, with its prompt and traceback."""
        grant = granted.grant
        with anyio.CancelScope() as scope:
            self._generating[grant.group] = scope
            try:
                return await self._rollout(granted)
            except BaseException as caught:  # The group's edge: counted as a failure.
                if anyio.current_effective_deadline() == -math.inf:
                    # We are cancelled; any other cancellation leaked out of what was called. An engine that is
                    # cancelled beside us ends its responses with an error, which would hide why the run ends.
                    await checkpoint_if_cancelled()
                    raise
                if isinstance(first_cause(caught), EngineDied):
                    raise  # Its groups are lost with it, and issued again; a failure would be their fate.
                reason = caught.reason if isinstance(caught, GroupFailed) else "generation_error"
                what = "".join(traceback.format_exception(caught))
                return GroupFailure(grant.group, reason, f"prompt {grant.prompt.id!r}: {what}")
            finally:
                del self._generating[grant.group]
        return GroupFailure(grant.group, CANCELLED, "no batch to come could train it")

    async def _generate(self, granted: _Granted, prompt_ids: tuple[int, ...]) -> Sequence[Completion]:
        """Generate a group's completions. Waiting for a turn to decode and decoding have a limit each."""
        decodes = False
        grant, settings = granted.grant, self._settings
        surplus = settings.oversample

        def turn(decoding: bool) -> None:
            nonlocal decodes
            decodes = decoding
            self._patience.renew(limit, settings.group_timeout_s if decoding else settings.queue_timeout_s)

        with self._patience.limit(settings.queue_timeout_s) as limit:
            return await self._generator.generate(
                GroupRequest(
                    prompt_ids=prompt_ids,
                    seeds=tuple(sample_seed(grant.seed, grant.group, i) for i in range(grant.size + surplus)),
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    turn=turn,
                    batch=granted.batch,
                    peers=granted.peers,
                    surplus=surplus,
                    prompt=grant.prompt,
                )
            )
        if decodes:
            raise GroupFailed(
                "timeout",
                f"group {grant.group} generated for longer than {settings.group_timeout_s:g} s "
                "(collector.group_timeout_s)",
            )
        raise GroupFailed(
            QUEUE_TIMEOUT,
            f"group {grant.group} waited for longer than {settings.queue_timeout_s:g} s for its turn to decode "
            "(collector.queue_timeout_s)",
        )

    async def _rollout(self, granted: _Granted) -> Rolled:
        """Generate, score and flatten one group."""
        grant, prompt_ids = granted.grant, granted.prompt
        if isinstance(prompt_ids, Exception):
            raise prompt_ids
        completions = await self._generate(granted, prompt_ids)
        outcomes = self._checked(completions, await self._score(grant, completions))
        failures = [outcome for outcome in outcomes if isinstance(outcome, SampleFailure)]
        if len(failures) == len(outcomes):
            cause = failures[0].cause
            raise GroupFailed(
                "generation_error" if cause in UNTRAINABLE else cause,
                f"all {grant.size} samples of group {grant.group} failed; the first: {failures[0].error}",
            )
        outcomes = [self._stand_in(outcome) for outcome in outcomes]
        group, columns = flatten(grant, granted.version, prompt_ids, completions, outcomes, self._taggers)
        return group, columns, tuple(dict.fromkeys(failure.error for failure in failures))

    async def _score(self, grant: Grant, completions: Sequence[Completion]) -> list[Outcome]:
        """Score all samples, unless they bring what they are worth; a failure concerns its sample only."""
        given = [completion.outcome for completion in completions if completion.outcome is not None]
        if len(given) == len(completions):
            return given
        responses = [
            Response(self._tokenizer.decode(list(c.token_ids)), tokens=len(c.token_ids), finished=c.finished)
            for c in completions
        ]
        return await self._scorer.score(grant.prompt, responses)

    def _checked(self, completions: Sequence[Completion], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Fail samples that cannot be trained on: bad log-probabilities, or an extra of another kind."""
        checked: list[Outcome] = [
            outcome if completion.fault is None else SampleFailure(BAD_LOGPROBS, completion.fault)
            for completion, outcome in zip(completions, outcomes, strict=True)
        ]
        rewards = [outcome for outcome in checked if isinstance(outcome, Reward)]
        # The kinds of the first group hold for the run: a training batch joins samples of many groups, so a later group
        # of another kind would break it.
        kinds = self._extra_kinds = self._extra_kinds or common_kinds(rewards)
        for i, outcome in enumerate(checked):
            odd = odd_extra(outcome, kinds) if isinstance(outcome, Reward) else None
            if odd is not None:
                checked[i] = SampleFailure(SCORE_ERROR, odd)
        return checked

    def _stand_in(self, outcome: Outcome) -> Outcome:
        """Return the configured reward in place of a score that failed, if there is one."""
        value = self._settings.reward_on_failure
        if value is None or not isinstance(outcome, SampleFailure) or outcome.cause in UNTRAINABLE:
            return outcome
        return StandIn(value, cause=outcome.cause)

    def _new_traffic(self) -> Traffic:
        before, self._traffic = self._traffic, self._plane.traffic()
        return self._traffic.minus(before)

    async def _put(self, group: GroupMeta, columns: Columns) -> GroupMeta:
        """Write the group; if the store is full, try again with growing pauses until the deadline."""
        pause = _FIRST_RETRY_S
        refusal = StoreFull(f"{group.row} found no room within {self._settings.put_timeout_s:g} s")
        with anyio.move_on_after(self._settings.put_timeout_s):
            while True:
                try:
                    return await self._plane.put(self._settings.partition, group, columns)
                except StoreFull as error:
                    refusal = error
                await anyio.sleep(pause)
                pause = min(2 * pause, _LAST_RETRY_S)
        raise refusal
