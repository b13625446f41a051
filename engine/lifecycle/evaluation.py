"""What evaluates: a collector of its own, which no publish reaches, and the partition that it writes to.

It decodes in this project's own engine whatever `collector.engine` is: servers hold one version, that of training.
"""

from collections.abc import Sequence
from typing import Any

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.scoring import Scorer
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.data_plane.base import DataPlane, Partition
from asyncrl.engine.deployment import EVALUATION, EVALUATOR
from asyncrl.engine.lifecycle.environments import with_environment
from asyncrl.engine.lifecycle.parts import build_generator, run_tokenizer, stop_ids, with_slots
from asyncrl.engine.records import Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.weights.base import WeightTransport


def evaluation_config(config: RunConfig, prompts: Sequence[Prompt]) -> RunConfig:
    """Return the configuration of the collector that evaluates these prompts: as a run's, with what differs."""
    asked, rollout, collector = config.evaluation, config.rollout, config.collector
    changed = config.model_copy(
        update={
            "filters": [],
            "rollout": rollout.model_copy(
                update={
                    "group_size": asked.samples,
                    "temperature": asked.temperature,
                    "max_new_tokens": asked.max_new_tokens or rollout.max_new_tokens,
                    "oversample": 0,
                    "stale_mode": "drop",
                }
            ),
            # Nothing of it is trained.
            "trainer": config.trainer.model_copy(update={"router_replay": False}),
            "collector": collector.model_copy(
                update={
                    "count": 1,
                    "engine": "batch" if collector.engine == "batch" else "auto",
                    "device": asked.device,
                    "slot_tokens": None,
                    "on_update": "keep",
                    # All prompts are granted at once; the evaluation as a whole has the limit.
                    "queue_timeout_s": asked.timeout_s,
                    "group_timeout_s": asked.timeout_s,
                }
            ),
        }
    )
    return with_slots(changed, prompts)


def evaluation_partition(config: RunConfig, extras: Sequence[str] = ()) -> Partition:
    """Return the partition of evaluated groups; `extras` are the tensors that the run's task attaches."""
    return Partition(EVALUATION, config.evaluation.samples, (*COLUMNS, *extras), (EVALUATOR,))


def build_evaluator(
    config: RunConfig,
    *,
    model: Any,
    scorer: Scorer,
    plane: DataPlane,
    transport: WeightTransport,
    blocking: Blocking[Any],
) -> Collector:
    """Build the collector that evaluates; `config` is the `evaluation_config`."""
    tokenizer = run_tokenizer(config)
    generator = build_generator(config, 0, model, tokenizer, blocking=blocking)
    return Collector(
        EVALUATOR,
        CollectorSettings.of(config, EVALUATION),
        generator=with_environment(config, generator, tokenizer, stop_ids=stop_ids(config, tokenizer), taken=()),
        scorer=scorer,
        tokenizer=tokenizer,
        plane=plane,
        transport=transport,
    )
