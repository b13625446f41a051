"""vLLM's AsyncLLM behind the engine protocol, with weights updated in place.

Invariant: weights change only while vLLM is paused, and under `_control`, which whoever pauses, resumes or updates
holds: nobody resumes vLLM in the middle of a swap. What was cached of a prompt under one version is never found
under another: the version is part of the cache's key, and who has no token yet when it changes is asked anew.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

import anyio
import torch
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from asyncrl.collectors.engines.admission import Flight
from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Cache, Chunk, Finish, InFlight, Request, Result
from asyncrl.collectors.engines.elsewhere import EngineElsewhere
from asyncrl.collectors.engines.in_flight import InFlightLimit, Pressure
from asyncrl.collectors.engines.state_files import StateFiles
from asyncrl.collectors.engines.stop_text import Text
from asyncrl.collectors.engines.swap import swap
from asyncrl.collectors.engines.vllm.process import CacheUse, FileLoader, prepare, start
from asyncrl.collectors.engines.vllm.settings import VLLMSettings
from asyncrl.engine.errors import AsyncRLError, EngineDied, GenerationError, VersionError

Start = Callable[[VLLMSettings, CacheUse], AsyncLLM]

_MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
_DIED = "vLLM's engine process died; its own log says why"
_SILENT_INTERVAL = 32
"""Tokens between two outputs of a request that nobody streams; its first token always comes alone."""
_HEALTH_EVERY_S = 1.0
_START_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 120.0


@dataclass(eq=False, slots=True)
class _Round:
    """What vLLM knows a request by, until an update takes it back; `began` once it has a token."""

    name: str
    began: bool = False
    again: bool = False


class VLLMEngine(EngineElsewhere):
    """Stop strings need the `text` of tokens, special ones included. `start` makes the AsyncLLM; it may block."""

    def __init__(self, settings: VLLMSettings, *, text: Text | None = None, start: Start = start) -> None:
        self._in_flight = in_flight = InFlightLimit(settings.rows)
        super().__init__(max_length=settings.max_length, limit=lambda: in_flight.limit, text=text)
        self._settings = settings
        self._make = start
        self._llm: AsyncLLM | None = None
        self._files: StateFiles | None = None
        self._rounds: dict[Flight, _Round] = {}
        self._asked = 0
        self._started = anyio.Event()
        self._broken: GenerationError | None = None
        self._cache_use = CacheUse(self._adapt)

    async def run(self) -> None:
        """Start vLLM, then serve until cancelled; EngineDied once its process is gone."""
        try:
            with anyio.fail_after(_START_TIMEOUT_S):
                await anyio.to_thread.run_sync(self._start, abandon_on_cancel=True)
                await prepare(self._running)
            async with self._control:
                await self._go_on()
            self._started.set()
            # vLLM tells only who asks, or has a request in flight.
            while self._broken is None and not self._running.errored:  # noqa: ASYNC110
                await anyio.sleep(_HEALTH_EVERY_S)
            raise self._broken or EngineDied(_DIED)
        except TimeoutError:
            raise GenerationError(f"vLLM did not start within {_START_TIMEOUT_S:g} s") from None
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests, all by default, each with the partial result `abort`, also while paused."""
        self._admission.end_waiting(ids)
        for flight in self._admission.running:
            if ids is None or flight.request_id in ids:
                flight.ending = "abort"
                await self._end_round(flight)

    async def pause(self, in_flight: InFlight = "keep") -> None:
        """Return once no forward pass runs. A `drain` can be cut short by an abort."""
        if in_flight == "abort":
            await self.abort()
        async with self._control:
            self._paused = True
            self._admission.close()
            if in_flight == "abort":  # What was let in meanwhile: vLLM would keep it until the pause ends.
                await self.abort()
            if self._llm is not None:
                await self._llm.pause_generation(mode=_MODES[in_flight], clear_cache=False)
            if in_flight != "keep":
                await self._admission.drained()
            self._watch.turn(paused=True)

    async def reset_cache(self) -> None:
        """Forget what was cached of prompts; what is in flight continues on a cache made anew."""
        async with self._control:
            await self._hold()
            try:
                await self._empty_cache()
            finally:
                await self._go_on()

    async def close(self) -> None:
        """End vLLM's processes and remove the files; requests in flight end as aborted."""
        if self._closed:
            return
        self._closed = True
        ended: Finish = "error" if self._broken or (self._llm is not None and self._llm.errored) else "abort"
        self._admission.fail("the engine has ended", ending=ended)
        if self._llm is not None:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S):
                await self.abort()
                await self._admission.drained()
            await anyio.to_thread.run_sync(self._llm.shutdown)
        if self._files is not None:
            self._files.close()

    @property
    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise GenerationError("vLLM has not started yet")
        return self._llm

    def _start(self) -> None:
        settings = self._settings
        files = StateFiles(settings.model_path, getattr(torch, settings.dtype), Path(settings.weights_folder))
        with ExitStack() as undo:
            undo.callback(files.close)
            llm = self._make(settings, self._cache_use)
            if self._closed:
                # Nobody waits any more: the thread outlived a cancelled start.
                llm.shutdown()
                return
            undo.pop_all()
        self._files, self._llm = files, llm

    async def _ask(self, request: Request, answer: Answer, flight: Flight) -> AsyncGenerator[Chunk | Result, None]:
        """Ask vLLM until the response ends: once, and again if an update took the request back."""
        error, again = flight.error, True
        while again and not flight.ending and not answer.ended and answer.left > 0:
            self._asked += 1
            current = self._rounds[flight] = _Round(f"{request.id}#{self._asked}")
            version = self._version
            try:
                async with aclosing(self._outputs(request, answer, flight)) as chunks:
                    async for chunk in chunks:
                        if request.stream:
                            yield chunk
            except EngineDeadError as failure:
                raise EngineDied(_DIED) from failure
            except (EngineGenerateError, ValueError) as failure:
                flight.ending, error = "error", str(failure) or type(failure).__name__
                # It is not told which version made them: the one that served when they were asked for is the oldest.
                answer.take_spans(((version, 0, answer.untold),))
            finally:
                del self._rounds[flight]
            again = current.again
        yield answer.result(flight.ending or ("stop" if answer.ended else "length"), error)

    async def _outputs(self, request: Request, answer: Answer, flight: Flight) -> AsyncGenerator[Chunk, None]:
        """Yield what vLLM makes in one round; the last output brings the versions."""
        current = self._rounds[flight]
        prompt = tokens_input(answer.prompt_ids, cache_salt=f"version-{self._version}")
        outputs = self._running.generate(prompt, _parameters(request, answer), current.name)
        finished = False
        try:
            async for output in outputs:
                (completion,) = output.outputs
                logprobs = completion.logprobs or []
                chosen = zip(logprobs, completion.token_ids, strict=True)
                chunk = answer.take(completion.token_ids, [entry[token].logprob for entry, token in chosen])
                finished = output.finished
                if finished:
                    spans = completion.weight_versions or []
                    answer.take_spans(tuple((int(span.version), span.start, span.end) for span in spans))
                if chunk is not None:
                    current.began = True
                    self._tokens += len(chunk.token_ids)
                    yield chunk
                if answer.ended and not finished:
                    await self._running.abort(current.name)
            if completion.finish_reason == "error":
                raise EngineGenerateError("vLLM ended the request with an error; its own log says why")
            if completion.finish_reason == "abort" and not current.again and not answer.ended:
                flight.ending = "abort"
        finally:
            with anyio.CancelScope(shield=True):
                if not finished and not self._running.errored:
                    await self._running.abort(current.name)
                await outputs.aclose()

    async def _end_round(self, flight: Flight) -> None:
        if flight in self._rounds and not self._running.errored:
            await self._running.abort(self._rounds[flight].name)

    async def _ready_files(self) -> StateFiles:
        """Wait for vLLM's start: the first update comes before it."""
        with anyio.move_on_after(_START_TIMEOUT_S):
            await self._started.wait()
        if self._files is None:
            raise VersionError(f"vLLM has not started within {_START_TIMEOUT_S:g} s, and takes no weights")
        return self._files

    def _cache_used(self) -> float:
        return self._cache_use.share

    async def _swap(self, version: int, file: Path, cache: Cache) -> float:
        """Swap the weights between two tokens; return for how many seconds none was made."""
        llm, files = self._running, self._files
        assert files is not None
        async with self._control:
            await self._hold()
            held = anyio.current_time()
            try:
                if cache == "recompute":
                    # Before the swap: an engine that refuses has changed nothing yet.
                    await self._empty_cache()
                loader = FileLoader(llm, Path(self._settings.model_path), _CALL_TIMEOUT_S)
                await swap(loader, version, file, files.served, old=self._version)
                files.serve(file)
                self._version = version
                for flight, current in list(self._rounds.items()):
                    if not current.began:
                        current.again = True
                        await self._end_round(flight)
            except AsyncRLError as error:
                files.remove(file)
                if isinstance(error, GenerationError):
                    self._broken = error
                raise
            finally:
                if self._broken is None:
                    await self._go_on()
            return anyio.current_time() - held

    def _adapt(self, pressure: Pressure) -> None:
        in_flight = len(self._admission.running)
        if self._in_flight.observe(pressure, in_flight=in_flight, now=anyio.current_time()):
            self._admission.admit()

    async def _hold(self) -> None:
        """Stop between two tokens. Paused by the user, it stays as it is."""
        self._admission.close()
        if not self._paused:
            await self._running.pause_generation(mode="keep", clear_cache=False)
            self._watch.turn(paused=True)

    async def _go_on(self) -> None:
        """End a pause, unless the user's own lasts."""
        if not self._paused and self._llm is not None:
            await self._llm.resume_generation()
            self._watch.turn(paused=False)
            self._admission.open()

    async def _empty_cache(self) -> None:
        if not await self._running.reset_prefix_cache(reset_running_requests=True):
            raise VersionError("vLLM refused to empty its cache; nothing was changed")


def _parameters(request: Request, answer: Answer) -> SamplingParams:
    sampling = request.sampling
    silent = not request.stream and not sampling.stop_strings
    return SamplingParams(
        max_tokens=answer.left,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=answer.seed,
        stop_token_ids=list(sampling.stop_ids),
        # The request's own stop ids end it, and nothing that vLLM reads out of a configuration.
        ignore_eos=True,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=_SILENT_INTERVAL if silent else 1,
        detokenize=False,
    )
