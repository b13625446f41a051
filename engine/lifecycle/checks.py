"""Checks of a checkpoint before anything starts.

They need only its files and a small random model of its architecture. Ranks and collectors try the real model once it
is loaded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from asyncrl.collectors.engines.rows import MAX_STOP_IDS
from asyncrl.configs import Loaded, RunConfig
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.backends import torch_backend
from asyncrl.engine.lifecycle.engines import ELSEWHERE
from asyncrl.engine.lifecycle.evaluation import evaluation_config
from asyncrl.engine.lifecycle.parts import (
    PROMPTS,
    check_engine,
    cost_model,
    positions_of,
    run_tokenizer,
    stop_ids,
)
from asyncrl.engine.model.causal_lm import outline_model
from asyncrl.engine.model.checkpoint import check_weights, read_config
from asyncrl.engine.model.device import choose_device, torch_dtype
from asyncrl.engine.model.hub import source_of
from asyncrl.engine.model.lora import adapter_size, choose_layers, layer_ends
from asyncrl.engine.model.settings import sampling_settings
from asyncrl.engine.model.sketch import sketch_model
from asyncrl.engine.model.tokenizer import CharTokenizer, Tokenizer
from asyncrl.engine.records import Prompt
from asyncrl.trainers.backends.alike import Alike
from asyncrl.trainers.backends.packing import has_varlen

log = structlog.get_logger()


def check_checkpoint(config: RunConfig, prompts: Sequence[Prompt], *, extras: Sequence[str] = ()) -> None:
    """Check the folder `model.path`: ConfigError if weights, tokens, prompts or layers do not fit the run."""
    assert config.model.path is not None
    architecture = read_config(config.model.path)
    check_weights(config.model.path)
    tokenizer = run_tokenizer(config)
    _check_tokens(config, architecture, tokenizer)
    _check_prompts(config, architecture, prompts, tokenizer)
    # A model that needs a task's extras cannot be tried without them.
    if not extras:
        _check_layers(config, architecture, tokenizer)


def check_evaluation(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Check that the run's model takes the prompts of evaluations; ConfigError for one that it does not."""
    tokenizer = run_tokenizer(config)
    try:
        for prompt in prompts if config.model.path is None else ():
            tokenizer.encode(prompt.text)
        used = evaluation_config(config, prompts)
        if used.model.path is not None:
            _check_prompts(used, read_config(used.model.path), prompts, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from error


def warn_of_settings(config: RunConfig) -> None:
    """Log the size of an adapter, and which settings of a checkpoint a run does not apply."""
    if config.lora.rank is not None:
        outline = outline_model(config.model, vocab_size=CharTokenizer.vocab_size)
        log.info(
            "an adapter is trained; the model's own weights stay as they are",
            numbers=adapter_size(outline, config.lora),
            of=sum(parameter.numel() for parameter in outline.parameters()),
            layers=layer_ends(choose_layers(outline, config.lora.target_modules)),
        )
    if config.model.path is None:
        return
    name, commit = source_of(config.model.path)
    if commit is not None:
        log.info("the model is one of the Hugging Face Hub", name=name, commit=commit, folder=config.model.path)
    ignored = sampling_settings(config.model.path)
    if ignored:
        log.info("the checkpoint's sampling settings are not applied; rollout.temperature alone is", **ignored)
    if cost_model(config) is None:
        log.warning("the FLOPs of this model are not known from its configuration; plans are balanced by tokens")


def _check_tokens(config: RunConfig, architecture: Any, tokenizer: Tokenizer) -> None:
    known, stops = architecture.get_text_config().vocab_size, stop_ids(config, tokenizer)
    if len(stops) > MAX_STOP_IDS and config.collector.engine not in ELSEWHERE:
        raise ConfigError(
            f"{len(stops)} tokens end responses (rollout.stop_token_ids, and those of the tokenizer and "
            f"generation_config.json), and the engine takes at most {MAX_STOP_IDS}"
        )
    odd = [token for token in (tokenizer.pad_id, *stops) if not 0 <= token < known]
    if odd:
        raise ConfigError(
            f"token {odd[0]} pads or ends responses, by the tokenizer, generation_config.json or "
            f"rollout.stop_token_ids, and the model of {config.model.path!r} knows tokens 0 to {known - 1}"
        )


def _check_prompts(config: RunConfig, architecture: Any, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    known, positions = architecture.get_text_config().vocab_size, positions_of(architecture)
    new, most = config.longest_response, config.data.max_prompt_tokens
    if positions is not None and most is not None and most + new > positions:
        raise ConfigError(
            f"data.max_prompt_tokens is {most} and {config.longest_option} {new}; together they must be at most the "
            f"model's {positions} positions"
        )
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.text), reverse=True)[:PROMPTS]:
        ids = tokenizer.encode(prompt.text)
        if not ids:
            raise ConfigError(f"prompt {prompt.id} has no token; generation needs at least one")
        if max(ids) >= known:
            raise ConfigError(
                f"prompt {prompt.id} has token {max(ids)}, and the model of {config.model.path!r} knows tokens 0 to "
                f"{known - 1}; the tokenizer is another model's"
            )
        if positions is not None and len(ids) + new > positions:
            raise ConfigError(
                f"prompt {prompt.id} has {len(ids)} tokens, and {config.longest_option} is {new}: together they must "
                f"be at most the model's {positions} positions. Lower {config.longest_option}, or leave the prompt out "
                "(data.max_prompt_tokens)"
            )


def _check_layers(config: RunConfig, architecture: Any, tokenizer: Tokenizer) -> None:
    """Try generation and a micro-batch with a small model of the architecture, if one can be made."""
    model = sketch_model(architecture)
    if model is None:
        return
    if config.collector.engine not in ELSEWHERE:
        check_engine(config, model)
    if config.trainer.backend == "megatron":  # It has layers of its own.
        return
    places = [(torch.device("cpu"), torch.float32)]
    device, dtype = _place(config)
    # The kernel runs only on its device. Everything else is the same, and more exact, on the CPU.
    if config.trainer.packs and has_varlen(device, dtype):
        places.append((device, dtype))
    for place in places:
        _try_layers(config, model, *place)


def with_packing(loaded: Loaded, *, extras: Sequence[str] = ()) -> Loaded:
    """Return a configuration that says whether rows are packed, if it does not say so yet (`trainer.packed` null)."""
    trainer = loaded.config.trainer
    if trainer.packed is not None:
        return loaded
    packed, padded = (
        loaded.config.model_copy(update={"trainer": trainer.model_copy(update={"packed": choice})})
        for choice in (True, False)
    )
    config = packed if _pack_well(packed, extras) else padded
    return replace(loaded, config=config, sources={**loaded.sources, "trainer.packed": "the choice at the start"})


def _pack_well(config: RunConfig, extras: Sequence[str]) -> bool:
    """Return whether the kernel for varying lengths runs, and a small model then keeps samples apart.

    A model that needs a task's extras, or has no small one of its kind, cannot be tried.
    """
    device, dtype = _place(config)
    if extras or not has_varlen(device, dtype):
        return False
    if config.model.path is None or config.trainer.backend == "megatron":
        return True
    model = sketch_model(read_config(config.model.path))
    if model is None:
        return False
    try:
        _try_layers(config, model, device, dtype)
    except ConfigError as error:
        log.warning("rows are padded, because layers of this model do not pack them", why=str(error))
        return False
    return True


def _place(config: RunConfig) -> tuple[torch.device, torch.dtype]:
    """Return where ranks train, and the type that they compute in."""
    return choose_device(config.trainer.device, 0), torch_dtype(config.model.dtype)


def _try_layers(config: RunConfig, model: Any, device: torch.device, dtype: torch.dtype) -> None:
    trainer, model = config.trainer, model.to(device)
    alike = Alike(model, temperature=config.rollout.temperature)
    backend = torch_backend(config, model, pad_id=0, dtype=dtype)
    alike.check(backend, packed=trainer.packs, align=trainer.align, dtype=dtype)
