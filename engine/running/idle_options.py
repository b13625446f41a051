"""Options that another one leaves without an effect: one that a user has set is refused, with what would give it one.

What a preset, or a run that is resumed, brings along counts as not set: the other option may have been changed since.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.configs import Loaded, RunConfig, load
from asyncrl.configs.load import flatten, preset_names
from asyncrl.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Idle:
    """Options, as beginnings of keys, that do nothing while `idle` is true of a configuration, and `why`.

    Those of `evaluation` are never idle: `asyncrl eval RUN` goes by them later. Nor are those that `runtime: local`
    does without: the same file is to serve on Ray.
    """

    options: tuple[str, ...]
    idle: Callable[[RunConfig], bool]
    why: Callable[[RunConfig], str]


def _is(option: str, ending: str) -> Callable[[RunConfig], str]:
    """Say what an option is, and what follows from it."""
    return lambda config: f"{option} is {flatten(config)[option]!r}{ending}"


IDLE = (
    Idle(
        ("rollout.gate_timeout_s",),
        lambda config: config.rollout.stale_mode != "gate",
        _is("rollout.stale_mode", ", by which no batch waits at a gate"),
    ),
    Idle(
        ("trainer.importance_cap",),
        lambda config: not config.trainer.decoupled,
        lambda _: "trainer.recompute_logprobs is false and trainer.updates_per_batch 1, by which there are no weights",
    ),
    Idle(
        ("trainer.forward_tokens",),
        lambda config: not config.trainer.later_column_count,
        lambda _: (
            "neither trainer.recompute_logprobs, trainer.updates_per_batch nor trainer.reference_kl asks for a "
            "stage that runs forward alone"
        ),
    ),
    Idle(
        ("trainer.sft_warm_up_batch", "trainer.sft_warm_up_learning_rate"),
        lambda config: not config.trainer.sft_warm_up_steps,
        _is("trainer.sft_warm_up_steps", ", by which there is no warm-up"),
    ),
    Idle(
        ("trainer.offload_optimizer",),
        lambda config: config.trainer.device == "cpu",
        _is("trainer.device", ", on which the optimizer is in the host's memory anyway"),
    ),
    Idle(
        ("collector.server_timeout_s",),
        lambda config: config.collector.engine != "http",
        _is("collector.engine", ", which asks no server"),
    ),
    Idle(
        ("collector.cache_gib", "collector.slot_tokens"),
        lambda config: config.collector.engine == "batch",
        _is("collector.engine", ", which keeps no slots"),
    ),
    Idle(
        ("collector.compile",),
        lambda config: config.collector.engine not in ("auto", "native"),
        _is("collector.engine", ", and only the native engine is compiled here"),
    ),
    Idle(
        ("collector.score_processes", "collector.score_timeout_s"),
        lambda config: config.environment.name is not None,
        _is("environment.name", ", whose steps give the rewards, so nothing scores"),
    ),
    Idle(
        ("collector.max_failures_in_a_row",),
        lambda config: config.collector.on_error == "abort",
        _is("collector.on_error", ", by which the first failure ends the run"),
    ),
    Idle(
        ("run.save_timeout_s", "run.save_best"),
        lambda config: not config.run.save_model,
        _is("run.save_model", ", by which nothing is saved"),
    ),
    Idle(
        ("checkpoint.keep", "checkpoint.timeout_s"),
        lambda config: not config.checkpoint.is_kept,
        lambda _: "checkpoint.every_steps and every_s are null and at_end is false, by which there are no checkpoints",
    ),
    Idle(
        ("model.hidden_size", "model.layers", "model.heads", "model.intermediate_size"),
        lambda config: config.model.path is not None,
        _is("model.path", ", whose config.json says that"),
    ),
    Idle(
        ("data_plane.mooncake_",),
        lambda config: config.data_plane.backend != "mooncake",
        _is("data_plane.backend", ", and not mooncake"),
    ),
    Idle(
        ("data_plane.shared_memory",),
        lambda config: config.data_plane.backend == "mooncake",
        _is("data_plane.backend", ", which keeps rows in its own memory"),
    ),
)


def check_idle_options(loaded: Loaded) -> None:
    """Refuse what a user has set and has no effect; ConfigError names it, its value and the option in the way."""
    for option, value, usual, why in _found(loaded):
        raise ConfigError(
            f"{option} (from {loaded.sources[option]}) is {value!r}, and would change nothing: {why}. Leave it out "
            f"(it is {usual!r} then), or change the other"
        )


def _found(loaded: Loaded) -> Iterator[tuple[str, object, object, str]]:
    values, usual = flatten(loaded.config), flatten(load().config)
    given = [option for option in values if values[option] != usual[option] and _by_user(loaded.sources, option)]
    for rule in IDLE:
        for option in given:
            if option.startswith(rule.options) and rule.idle(loaded.config):
                yield option, values[option], usual[option], rule.why(loaded.config)


def _by_user(sources: Mapping[str, str], option: str) -> bool:
    source = sources.get(option, "")
    return bool(source) and source not in preset_names() and not source.startswith("the run ")
