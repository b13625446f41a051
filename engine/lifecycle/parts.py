"""Builds collectors and ranks from a configuration, in the same way for every runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.engines.checks import check_decoding
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.generators.base import Generator
from asyncrl.collectors.generators.cached import check_cached
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.collectors.scoring import Scorer
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.data_plane.base import DataPlane, Partition
from asyncrl.engine.deployment import CONSUMER, PARTITION
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.backends import build_backend, rank_device, takes_part
from asyncrl.engine.lifecycle.engines import ELSEWHERE, build_elsewhere
from asyncrl.engine.lifecycle.environments import with_environment
from asyncrl.engine.model.causal_lm import build_model, cast_weights
from asyncrl.engine.model.device import choose_device, torch_dtype
from asyncrl.engine.model.lora import add_adapter
from asyncrl.engine.model.settings import end_tokens, read_json
from asyncrl.engine.model.tokenizer import CharTokenizer, ChatTokenizer, Tokenizer, load_tokenizer
from asyncrl.engine.model.writer import ModelWriter
from asyncrl.engine.records import Prompt
from asyncrl.engine.records.columns import COLUMNS, REFERENCE_LOGPROBS, ROUTED_EXPERTS, TRAINER_LOGPROBS
from asyncrl.engine.weights.base import WeightTransport
from asyncrl.filters import build_chain
from asyncrl.filters.taggers import Tagger
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.cost.peak import peak_flops
from asyncrl.trainers.links import Links
from asyncrl.trainers.parallel import Parallel
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.schedule import Schedule

log = structlog.get_logger()

PROMPTS = 2000
"""Of this many prompts, those with the longest texts, the tokens are counted. A longer one fails later."""


def train_partition(config: RunConfig, extras: Sequence[str] = ()) -> Partition:
    """Return the partition of training groups; `extras` are the tensors that the run's task attaches."""
    later = (TRAINER_LOGPROBS, REFERENCE_LOGPROBS)
    columns = (*COLUMNS, *extras, *_replayed(config))
    return Partition(PARTITION, config.rollout.group_size, columns, (CONSUMER,), later=later)


def _replayed(config: RunConfig) -> tuple[str, ...]:
    return (ROUTED_EXPERTS,) if config.trainer.router_replay else ()


def cost_model(config: RunConfig) -> CostModel | None:
    """Return the cost model of the run's model, from its configuration; None if that does not tell the FLOPs."""
    if config.model.path is not None:
        try:
            return CostModel.of(read_json(Path(config.model.path) / "config.json"))
        except ValueError:
            return None
    model = config.model
    return CostModel.of(
        {
            "model_type": "llama",
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.heads,
            "vocab_size": CharTokenizer.vocab_size,
        }
    )


def tokenized(examples: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Return (ids of prompt, answer and end, prompt tokens) of a task's examples."""
    pairs = []
    for prompt, answer in examples:
        ids = tokenizer.encode(prompt)
        pairs.append(([*ids, *tokenizer.encode_more(answer), tokenizer.eos_id], len(ids)))
    return pairs


def run_tokenizer(config: RunConfig) -> ChatTokenizer:
    return load_tokenizer(config.model.path, add_bos=config.rollout.add_bos)


def stop_ids(config: RunConfig, tokenizer: Tokenizer) -> list[int]:
    """Return every token that ends a response: of the tokenizer, of the checkpoint's settings, and configured."""
    path = config.model.path
    return sorted({tokenizer.eos_id, *(end_tokens(path) if path else ()), *config.rollout.stop_token_ids})


def positions_of(architecture: Any) -> int | None:
    """Return the largest number of positions in a Hugging Face configuration; None if it does not name one.

    Of LongRoPE only the first ones count, of before it was stretched: a pass with any position beyond rotates all of
    its positions otherwise, so that a sample's log-probabilities would depend on what else is in its micro-batch.
    """
    text = architecture.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) or {}
    for one in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):
        if one.get("rope_type") == "longrope":
            first = getattr(text, "original_max_position_embeddings", None)
            found = one.get("original_max_position_embeddings") or first or found
    return int(found) if found else None


def all_taggers(config: RunConfig, more: Mapping[str, Tagger]) -> dict[str, Tagger]:
    """Return the taggers of the configured filters, and `more`, those of filters that were given as objects."""
    return {**build_chain(config.filters, min_live=config.rollout.min_live).taggers, **more}


def longest_prompt(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> int:
    """Return the tokens of the longest prompt among the PROMPTS with the longest texts."""
    longest = sorted(prompts, key=lambda prompt: len(prompt.text), reverse=True)[:PROMPTS]
    return max((len(tokenizer.encode(prompt.text)) for prompt in longest), default=1)


def with_slots(config: RunConfig, prompts: Sequence[Prompt]) -> RunConfig:
    """Return a configuration that says how many tokens a slot of the native engine holds."""
    if config.collector.slot_tokens is not None:
        return config
    tokens = tokens_of_longest(config, prompts)
    return config.model_copy(update={"collector": config.collector.model_copy(update={"slot_tokens": tokens})})


def tokens_of_longest(config: RunConfig, prompts: Sequence[Prompt]) -> int:
    """Return how many tokens the longest prompt and the longest response to it have together."""
    longest = config.data.max_prompt_tokens or longest_prompt(prompts, run_tokenizer(config))
    return longest + config.longest_response


def build_generator(
    config: RunConfig, index: int, model: Any, tokenizer: Tokenizer, *, blocking: Blocking[Any]
) -> Generator:
    """Return the generator of the collector `index`: an engine elsewhere, the native one around `model`, or batches."""
    collector, exact = config.collector, config.rollout.max_staleness == 0
    if collector.engine in ELSEWHERE:
        engine = build_elsewhere(config, index, tokenizer)
        return EngineGenerator(engine, _sampling(config, tokenizer), on_update=collector.on_update)
    try:
        native = None if collector.engine == "batch" else _native(config, model, tokenizer, blocking=blocking)
    except ConfigError as error:
        if collector.engine == "native" or native_only(config):
            raise
        log.warning("the native engine cannot run this model; it decodes whole batches instead", why=str(error))
        native = None
    if native is not None:
        sampling = _sampling(config, tokenizer)
        return EngineGenerator(native, sampling, groups=native, exact=exact, on_update=collector.on_update)
    check_cached(model, pad_id=tokenizer.pad_id)
    return TorchGenerator(
        model,
        eos_id=tokenizer.eos_id,
        stop_ids=stop_ids(config, tokenizer),
        positions=positions_of(model.config) if config.model.path else None,
        pad_id=tokenizer.pad_id,
        decode_samples=collector.decode_samples,
        alone=exact,
        blocking=blocking,
    )


def native_only(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options that whole batches cannot honour: by option, its value and what it must be."""
    rollout, collector = config.rollout, config.collector
    options = {
        "rollout.top_p": (rollout.top_p, 1.0),
        "rollout.top_k": (rollout.top_k, 0),
        "rollout.min_p": (rollout.min_p, 0.0),
        "rollout.stop_strings": (rollout.stop_strings, []),
        "rollout.oversample": (rollout.oversample, 0),
        "collector.on_update": (collector.on_update, "keep"),
        "environment.name": (config.environment.name, None),
        "trainer.router_replay": (config.trainer.router_replay, False),
    }
    asked = {path: (value, off) for path, (value, off) in options.items() if value != off}
    if rollout.stale_mode == "tokens":
        asked["rollout.stale_mode"] = ("tokens", "drop or gate")
    return asked


def check_engine(config: RunConfig, model: Any) -> None:
    """Try the generator that a run would have on a small model; ConfigError if none can decode it."""
    engine = config.collector.engine
    try:
        if engine != "batch":
            check_decoding(model)
            return
    except ConfigError:
        if engine == "native" or native_only(config):
            raise
    check_cached(model, pad_id=0)


def _sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=tuple(stop_ids(config, tokenizer)),
        stop_strings=tuple(rollout.stop_strings),
    )


def _native(config: RunConfig, model: Any, tokenizer: Tokenizer, *, blocking: Blocking[Any]) -> NativeEngine:
    collector = config.collector
    assert collector.slot_tokens is not None, "with_slots comes first"
    settings = NativeSettings(
        rows=collector.decode_samples,
        length=collector.slot_tokens,
        cache_bytes=int(collector.cache_gib * 2**30),
        # A compiled model may leave out what is noted beside its outputs.
        compiled=collector.compile and next(model.parameters()).is_cuda and not config.trainer.router_replay,
        experts=config.trainer.router_replay,
    )
    return NativeEngine(model, settings, blocking=blocking, text=tokenizer.whole_text)


def build_collector(
    config: RunConfig,
    index: int,
    *,
    model: Any,
    scorer: Scorer,
    plane: DataPlane,
    transport: WeightTransport,
    blocking: Blocking[Any],
    taggers: Mapping[str, Tagger],
) -> Collector:
    tokenizer = run_tokenizer(config)
    generator = build_generator(config, index, model, tokenizer, blocking=blocking)
    return Collector(
        f"collector{index}",
        CollectorSettings.of(config, PARTITION),
        generator=with_environment(config, generator, tokenizer, stop_ids=stop_ids(config, tokenizer), taken=taggers),
        scorer=scorer,
        tokenizer=tokenizer,
        plane=plane,
        transport=transport,
        taggers=taggers,
    )


def build_run_model(config: RunConfig) -> Any:
    """Return the run's model in float32 on the CPU; equal in every process."""
    return build_model(config.model, vocab_size=CharTokenizer.vocab_size, seed=config.run.seed)


def rank_model(config: RunConfig, place: int) -> Any:
    """Return the model of the rank at `place` of the run's processes, in float32.

    It is on the rank's device, or in the host's memory where a rank takes only its part of the weights from there.
    """
    model = build_run_model(config)
    if config.lora.rank is not None:
        model = add_adapter(model, config.lora, seed=config.run.seed)
    return model if takes_part(config) else model.to(rank_device(config, place))


def collector_model(config: RunConfig, place: int) -> Any:
    """Return the model of the collector at `place` of the run's processes; None if its engine loads it."""
    if config.collector.engine in ELSEWHERE:
        return None
    return cast_weights(build_run_model(config), torch_dtype(config.model.dtype)).to(
        choose_device(config.collector.device, place)
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def build_rank(
    config: RunConfig,
    rank: int,
    *,
    model: Any,
    plane: DataPlane,
    links: Links,
    transport: WeightTransport,
    blocking: Blocking[Any],
    extras: Sequence[str] = (),
) -> TrainerRank:
    """Build a rank; ConfigError if the model does not take an extra, or does not keep samples apart.

    Ranks that keep shards of a model together build at the same time.
    """
    trainer = config.trainer
    own = [name for name in extras if name != ROUTED_EXPERTS]
    dtype, pad_id = torch_dtype(config.model.dtype), run_tokenizer(config).pad_id
    device = rank_device(config, rank) if takes_part(config) else next(model.parameters()).device
    backend = build_backend(config, model, pad_id=pad_id, dtype=dtype, device=device, extras=own, shards=links.shards)
    settings = RankSettings(
        rank=rank,
        ranks=trainer.ranks,
        partition=PARTITION,
        learning_rate=trainer.learning_rate,
        schedule=Schedule.of(config),
        min_step_s=trainer.min_step_s,
        fetch_policy=trainer.fetch_policy,
        extras=(*own, *_replayed(config)),
        peak_flops=peak_flops(_device_name(device), configured=trainer.peak_flops) or 0.0,
        parallel=Parallel.of(trainer),
        # Megatron's state comes to the host's memory anew each time, from all ranks together.
        reserve=config.checkpoint.is_kept and trainer.backend == "torch",
    )
    # Rank 0 alone saves, also what its siblings hold of its replica.
    saves = rank == 0 and config.run.save_model
    return TrainerRank(
        settings,
        backend=backend,
        plane=plane,
        reducer=links.reducer,
        transport=transport,
        blocking=blocking,
        siblings=links.siblings,
        writer=ModelWriter(config.model, model, vocab_size=CharTokenizer.vocab_size) if saves else None,
    )
