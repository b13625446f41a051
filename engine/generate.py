"""Answers from what a run has learned, or from any Hugging Face folder."""

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from asyncrl.collectors.engines.base import Chunk, Request, Result, Sampling
from asyncrl.collectors.generators.base import Generator, GroupRequest
from asyncrl.configs.sections.fields import MIN_TEMPERATURE
from asyncrl.engine.errors import ConfigError, GenerationError
from asyncrl.engine.events.segments import FILE_NAME as EVENTS
from asyncrl.engine.events.summary import FILE_NAME as SUMMARY
from asyncrl.engine.model.folder import ADAPTER_CONFIG, BEST, LAST, Note, find_folder, instead_of_adapter
from asyncrl.engine.model.settings import read_json
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.running.threads import run_beside_loop

if TYPE_CHECKING:
    from asyncrl.engine.model.tokenizer import Tokenizer

OnText = Callable[[int, int, str], Any]
ROWS = 64
"""At most so many answers decode together."""
CACHE_BYTES = 4 * 2**30
"""Fewer do if their keys and values would take more than this."""
_LOADS = 3


class _Engine(Protocol):
    """What answers are asked of: chunks of tokens, and where there is one a result at the end."""

    async def prepare(self) -> None: ...

    async def run(self) -> None: ...

    def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]: ...


class _InBatches:
    """Answers of a generator of whole batches, each in one piece."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.run = generator.run

    async def prepare(self) -> None:
        """Nothing has to be made ready."""

    async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        sampling = request.sampling
        asked = GroupRequest(request.prompt_ids, (request.seed,), sampling.max_new_tokens, sampling.temperature)
        for completion in await self._generator.generate(asked):
            yield Chunk(completion.token_ids, completion.logprobs)


def generate(
    folder: str | PathLike[str],
    prompts: Sequence[str],
    *,
    best: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    samples: int = 1,
    seed: int = 0,
    on_text: OnText | None = None,
) -> list[list[str]]:
    """Return `samples` answers to each prompt: `asyncrl generate` from Python.

        asyncrl.generate("runs/first", ["7>"])  # [["7"]]

    `folder` is a run's, whose last model answers, or with `best` its `model-best`; or any Hugging Face folder. A prompt
    goes in as it is, as a task's prompts do: no chat template is put around it. Temperature 0 takes the likeliest
    token. `on_text` is given each piece of text, with the numbers of prompt and sample, as it comes: one answer after
    the other, though they decode together. ConfigError for a folder without a model, and for options out of their
    range; GenerationError for a prompt that the model cannot take.
    """
    _check_options(max_new_tokens=max_new_tokens, temperature=temperature, samples=samples, seed=seed)
    asked = [prompts] if isinstance(prompts, str) else list(prompts)
    odd = next((i for i, prompt in enumerate(asked) if not isinstance(prompt, str) or not prompt), None)
    if odd is not None:
        raise ConfigError(
            f"prompt {odd} (the first is 0) is {asked[odd]!r}; it must be a text of at least one character"
        )
    model, tokenizer, stop_ids = _load(find_model(folder, best=best))
    sampling = Sampling(max_new_tokens, temperature=temperature, stop_ids=stop_ids)
    requests = [
        Request(f"{i}-{j}", tuple(tokenizer.encode(prompt)), sampling, seed=(seed * 1009 + i) * 1009 + j, group=str(i))
        for i, prompt in enumerate(asked)
        for j in range(samples)
    ]
    if not requests:
        return []
    engine = _engine(model, requests, tokenizer=tokenizer, stop_ids=stop_ids)
    try:
        answers = run_beside_loop(lambda _: anyio.run(_answer, engine, requests, tokenizer, samples, on_text))
    except ExceptionGroup as group:
        raise first_cause(group) from group
    return [answers[at : at + samples] for at in range(0, len(answers), samples)]


def find_model(folder: str | PathLike[str], *, best: bool = False) -> Path:
    """Return the folder that a model is loaded from, given a run's or its own; ConfigError says what is missing."""
    given = Path(fspath(folder))
    if not given.is_dir():
        found = None if best else find_folder(given)
        if found is None:
            what = "is a file, not a folder" if given.is_file() else "does not exist"
            raise ConfigError(f"{str(given)!r} {what}; name a run's folder, or one of a Hugging Face checkpoint")
        return found
    name = BEST if best else LAST
    inside = find_folder(given / name)
    if inside is not None:
        return inside
    if (given / "config.json").is_file() and not best:
        return given
    if best and (given / "config.json").is_file():
        raise ConfigError(f"{str(given)!r} is a checkpoint, and only a run's folder has {BEST}/; leave best out")
    if (given / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{str(given)!r} holds an adapter alone; {instead_of_adapter(given)}")
    if not (given / EVENTS).is_file():
        raise ConfigError(f"{str(given)!r} is neither a run's folder nor a Hugging Face checkpoint (config.json)")
    raise ConfigError(f"the run {str(given)!r} has no {name}/: {_why(given, best=best)}")


def _why(run: Path, *, best: bool) -> str:
    """Say why a run has not saved a model, as far as its summary tells."""
    try:
        summary = read_json(run / SUMMARY)
    except (OSError, ValueError):
        return "it goes on or was killed; with run.save_every N a run saves every N steps, otherwise when it ends"
    saved = summary.get("model")
    if not summary.get("steps"):
        return "it ended before a step was trained"
    if saved is None:
        return "run.save_model was false; train again with it true"
    if saved["failed_saves"]:
        return f"{saved['failed_saves']} saves failed, and {run / 'log.jsonl'} says why"
    if best:
        return "a best one is kept with run.save_every and run.save_best, once run.reward_window batches were judged"
    return "its summary says that it saved one, which is gone"


def _check_options(*, max_new_tokens: int, temperature: float, samples: int, seed: int) -> None:
    for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("samples", samples, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if temperature and not MIN_TEMPERATURE <= temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature:g}; it must be 0 or at least {MIN_TEMPERATURE:g}")
    if samples > 1 and not temperature:
        raise ConfigError(f"samples is {samples} and temperature 0, by which all of them are equal; raise temperature")


def _load(folder: Path) -> "tuple[Any, Tokenizer, tuple[int, ...]]":
    """Load model, tokenizer and end tokens, of one save: a run may put a newer one in its place meanwhile."""
    for _ in range(_LOADS):
        try:
            before = Note.read(folder)
            loaded = _load_once(str(folder))
        except ConfigError as error:
            raise ConfigError(f"cannot generate from {str(folder)!r}: {error}") from error
        if Note.read(folder) == before:
            return loaded
    raise ConfigError(f"{str(folder)!r} was replaced {_LOADS} times while it was read; save less often")


def _load_once(path: str) -> "tuple[Any, Tokenizer, tuple[int, ...]]":
    from asyncrl.engine.model.causal_lm import cast_weights
    from asyncrl.engine.model.checkpoint import load_checkpoint, read_config
    from asyncrl.engine.model.device import choose_device
    from asyncrl.engine.model.settings import end_tokens
    from asyncrl.engine.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    dtype = read_config(path).dtype
    model = load_checkpoint(path)
    model = model if dtype is None else cast_weights(model, dtype)
    stop_ids = tuple(sorted({tokenizer.eos_id, *end_tokens(path)}))
    return model.to(choose_device("auto", 0)), tokenizer, stop_ids


def _engine(model: Any, requests: Sequence[Request], *, tokenizer: "Tokenizer", stop_ids: Sequence[int]) -> _Engine:
    """Return what decodes: the native engine, or whole batches for a model that it cannot run."""
    from asyncrl.collectors.engines.native import NativeEngine
    from asyncrl.collectors.engines.settings import NativeSettings
    from asyncrl.collectors.generators.cached import check_cached
    from asyncrl.collectors.generators.torch_generator import TorchGenerator
    from asyncrl.engine.aio.blocking import in_place

    length = max(len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and length > positions:
        raise ConfigError(
            f"the longest prompt and max_new_tokens {requests[0].sampling.max_new_tokens} are {length} tokens "
            f"together, and the model has {positions} positions; lower max_new_tokens"
        )
    settings = NativeSettings(rows=min(len(requests), ROWS), length=max(length, 2), cache_bytes=CACHE_BYTES)
    try:
        return NativeEngine(model, settings, blocking=in_place)
    except ConfigError:  # A model whose layers it does not know; a run would fall back in the same way.
        check_cached(model, pad_id=tokenizer.pad_id)
    generator = TorchGenerator(
        model,
        eos_id=tokenizer.eos_id,
        stop_ids=stop_ids,
        pad_id=tokenizer.pad_id,
        decode_samples=ROWS,
        alone=False,
        blocking=in_place,
    )
    return _InBatches(generator)


async def _answer(
    engine: _Engine,
    requests: Sequence[Request],
    tokenizer: "Tokenizer",
    samples: int,
    on_text: OnText | None,
) -> list[str]:
    """Have all requests decode together; hand out the text of each once those before it are done."""
    pipes = [anyio.create_memory_object_stream[Sequence[int]](float("inf")) for _ in requests]
    answers: list[str] = []

    async def ask(request: Request, send: Any) -> None:
        with send:
            async for item in engine.generate(request):
                if isinstance(item, Chunk):
                    send.send_nowait(item.token_ids)
                elif item.finish in ("error", "abort"):
                    what = f"prompt {request.group} (the first is 0)"
                    raise GenerationError(f"{what} was not answered: {item.error or item.finish}")

    async with anyio.create_task_group() as tasks:
        await engine.prepare()
        tasks.start_soon(engine.run)
        for request, (send, _) in zip(requests, pipes, strict=True):
            tasks.start_soon(ask, request, send)
        for number, (_, receive) in enumerate(pipes):
            answers.append(await _text_of(receive, tokenizer, number, samples, on_text))
        tasks.cancel_scope.cancel()
    return answers


async def _text_of(tokens: Any, tokenizer: "Tokenizer", number: int, samples: int, on_text: OnText | None) -> str:
    ids: list[int] = []
    told = ""
    tell = partial(on_text, number // samples, number % samples) if on_text is not None else _nothing
    tell("")
    with tokens:
        async for more in tokens:
            ids.extend(more)
            text = tokenizer.decode(ids)
            # Bytes of its last character may still be missing.
            if text.startswith(told) and not text.endswith("\ufffd"):
                tell(text[len(told) :])
                told = text
    text = tokenizer.decode(ids)
    tell(text[len(told) :])
    return text


def _nothing(_: str) -> None:
    """Show nothing."""
