"""The configuration: frozen sections, each in a file of its own, and what must hold between them.

No field of a section has a default: `presets/default.yaml` is the one source of defaults.
"""

from typing import Annotated, Any

from pydantic import model_validator

from asyncrl.configs.rewards import reward_entries
from asyncrl.configs.sections.collector import Collector
from asyncrl.configs.sections.data_plane import DataPlane
from asyncrl.configs.sections.environment import EnvironmentSection
from asyncrl.configs.sections.evaluation import Evaluation
from asyncrl.configs.sections.fields import MIN_TEMPERATURE, Section, named
from asyncrl.configs.sections.lora import Lora
from asyncrl.configs.sections.model import Model
from asyncrl.configs.sections.rollout import Rollout
from asyncrl.configs.sections.run import Checkpoint, Run, Supervision
from asyncrl.configs.sections.task import Data, RewardSection, Task
from asyncrl.configs.sections.trainer import Trainer


class RunConfig(Section):
    """The whole configuration of a run."""

    run: Run
    checkpoint: Checkpoint
    model: Model
    lora: Lora
    task: Task
    data: Data
    reward: RewardSection
    environment: EnvironmentSection
    rollout: Rollout
    evaluation: Evaluation
    collector: Collector
    filters: list[Annotated[dict[str, Any], named("name", "{name: zero_std}")]]
    """The chain of filters in order: for each its name alone, or its `name` (built in, `module:Class` or
    `file.py:Class`) and its parameters."""
    trainer: Trainer
    data_plane: DataPlane
    supervision: Supervision

    @property
    def run_ahead_groups(self) -> int:
        """Groups that may be dispatched before their capacity comes back: with max_staleness 2 and 16 per step, 48."""
        return (self.rollout.max_staleness + 1) * self.rollout.groups_per_step

    @property
    def longest_response(self) -> int:
        """The longest response in tokens, replies of an environment included."""
        return self.rollout.max_new_tokens if self.environment.name is None else self.environment.max_tokens

    @property
    def longest_option(self) -> str:
        """The option that limits the longest response."""
        return "rollout.max_new_tokens" if self.environment.name is None else "environment.max_tokens"

    @property
    def queue_timeout_s(self) -> float:
        """Longest wait of a group for its turn to decode."""
        given = self.collector.queue_timeout_s
        return self.run_ahead_groups * self.collector.group_timeout_s if given is None else given

    @property
    def weights_folder(self) -> str:
        """Folder through which weights reach an engine outside the collector's own model."""
        return self.collector.weights_folder or "/dev/shm"

    @property
    def max_publish_lag(self) -> int:
        lag = self.rollout.max_publish_lag
        return min(1, self.rollout.max_staleness) if lag is None else lag

    @model_validator(mode="after")
    def _options_take_effect(self) -> "RunConfig":
        if self.trainer.fetch_policy != "auto":
            raise ValueError(
                f"trainer.fetch_policy is {self.trainer.fetch_policy}; it must be auto: every rank of the PyTorch "
                "backend holds a whole replica and reads for itself, so another policy would change nothing"
            )
        transport, folder = self.trainer.weight_transport, self.trainer.weight_folder
        if (transport == "folder") != (folder is not None):
            raise ValueError(
                f"trainer.weight_transport is {transport} and trainer.weight_folder {folder}; the transport folder "
                "needs a folder, and every other must have null"
            )
        return self

    @model_validator(mode="after")
    def _outage_ends_before_groups(self) -> "RunConfig":
        collector = self.collector
        if collector.engine == "http" and collector.server_timeout_s >= collector.group_timeout_s:
            raise ValueError(
                f"collector.server_timeout_s is {collector.server_timeout_s:g} and collector.group_timeout_s "
                f"{collector.group_timeout_s:g}; server_timeout_s must be less, or groups that wait for a server "
                "fail before it is known that none is left"
            )
        return self

    @model_validator(mode="after")
    def _environment_agrees(self) -> "RunConfig":
        if self.environment.name is not None and self.rollout.oversample:
            raise ValueError(
                f"environment.name is {self.environment.name} and rollout.oversample {self.rollout.oversample}; the "
                "samples of an environment are played to their end, so oversample must be 0"
            )
        return self

    @model_validator(mode="after")
    def _saves_agree(self) -> "RunConfig":
        run = self.run
        if run.save_every is not None and not run.save_model:
            raise ValueError(
                f"run.save_every is {run.save_every} and run.save_model false, by which nothing is saved; "
                "save_every must be null, or save_model true"
            )
        return self

    @model_validator(mode="after")
    def _learning_rate_agrees(self) -> "RunConfig":
        trainer, steps = self.trainer, self.run.steps
        kind, total = trainer.lr_schedule, trainer.lr_total_steps
        if kind == "constant" and total is not None:
            raise ValueError(
                f"trainer.lr_total_steps is {total} and trainer.lr_schedule constant, which has no end; lr_total_steps "
                "must be null, or lr_schedule linear or cosine"
            )
        if kind != "constant" and total is None and steps is None:
            raise ValueError(
                f"trainer.lr_schedule is {kind}, and trainer.lr_total_steps and run.steps are null; one of them must "
                "say when the learning rate is lowest"
            )
        if total is not None and steps is not None and total < steps:
            raise ValueError(
                f"trainer.lr_total_steps is {total} and run.steps {steps}; lr_total_steps must be at least as many, or "
                "the last steps would hardly learn"
            )
        end = total or steps
        if end is not None and trainer.lr_warm_up_steps >= end:
            name = "run.steps" if total is None else "trainer.lr_total_steps"
            raise ValueError(
                f"trainer.lr_warm_up_steps is {trainer.lr_warm_up_steps} and {name} {end}; the warm-up must be shorter"
            )
        if trainer.decay_vectors and not trainer.weight_decay:
            raise ValueError(
                "trainer.decay_vectors is true and trainer.weight_decay 0, by which nothing decays; decay_vectors must "
                "be false, or weight_decay greater than 0"
            )
        return self

    @model_validator(mode="after")
    def _lora_takes_effect(self) -> "RunConfig":
        lora, trainer = self.lora, self.trainer
        if lora.rank is None:
            for name, value, default in (("alpha", lora.alpha, None), ("target_modules", lora.target_modules, "auto")):
                if value != default:
                    raise ValueError(
                        f"lora.{name} is {value!r} and lora.rank null, by which all weights are trained; "
                        f"rank must be a number, or {name} {default or 'null'}"
                    )
        elif trainer.reference_kl and trainer.sft_warm_up_steps:
            raise ValueError(
                f"trainer.reference_kl is {trainer.reference_kl:g}, trainer.sft_warm_up_steps "
                f"{trainer.sft_warm_up_steps} and lora.rank {lora.rank}; with an adapter the reference is the model "
                "as it was loaded, not the warmed-up one. One of the first two must be 0"
            )
        return self

    @model_validator(mode="after")
    def _data_agree(self) -> "RunConfig":
        data = self.data
        if data.path is not None and data.sets:
            raise ValueError(f"data.path is {data.path!r} and data.sets has {len(data.sets)} entries; give one of them")
        if data.split is not None and data.path is None:
            raise ValueError(
                f"data.split is {data.split!r} and data.path null; an entry of data.sets has its own split"
            )
        if len({entry.weight is None for entry in data.sets}) > 1:
            raise ValueError("data.sets: some entries have a weight and some have none; give all of them one, or none")
        if "{prompt}" not in data.prompt_format:
            raise ValueError(f"data.prompt_format is {data.prompt_format!r}; it must hold {{prompt}}")
        if data.max_prompt_tokens is not None and data.min_prompt_tokens > data.max_prompt_tokens:
            raise ValueError(
                f"data.min_prompt_tokens is {data.min_prompt_tokens} and data.max_prompt_tokens "
                f"{data.max_prompt_tokens}; no prompt is within both"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_agrees(self) -> "RunConfig":
        evaluation, decode_samples = self.evaluation, self.collector.decode_samples
        if evaluation.every is None and not (evaluation.at_start and evaluation.at_end):
            raise ValueError(
                f"evaluation.at_start is {evaluation.at_start}, evaluation.at_end {evaluation.at_end} and "
                "evaluation.every null, by which a run has no evaluation; set every to a number of steps"
            )
        if evaluation.path is not None and evaluation.sets:
            raise ValueError(
                f"evaluation.path is {evaluation.path!r} and evaluation.sets has {len(evaluation.sets)} entries; "
                "give one of them"
            )
        if evaluation.split is not None and evaluation.path is None:
            raise ValueError(
                f"evaluation.split is {evaluation.split!r} and evaluation.path null; an entry of evaluation.sets has "
                "its own split"
            )
        if any(entry.weight is not None for entry in evaluation.sets):
            raise ValueError("evaluation.sets: an entry has a weight; every prompt is evaluated once, leave it out")
        if 0 < evaluation.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"evaluation.temperature is {evaluation.temperature:g}; it must be 0 or at least {MIN_TEMPERATURE:g}"
            )
        if evaluation.samples > 1 and not evaluation.temperature:
            raise ValueError(
                f"evaluation.samples is {evaluation.samples} and evaluation.temperature 0, by which all of them are "
                "equal; samples must be 1, or the temperature above 0"
            )
        # The groups of an evaluation are taken out again one by one.
        capacity, needed = self.data_plane.capacity_rows, self.run_ahead_groups + 1
        if evaluation.every is not None and capacity is not None and capacity < needed:
            raise ValueError(
                f"data_plane.capacity_rows is {capacity}; run-ahead needs {needed - 1} and evaluation 1 more, "
                f"so it must be at least {needed}"
            )
        if evaluation.samples > decode_samples:
            raise ValueError(
                f"evaluation.samples is {evaluation.samples} and collector.decode_samples {decode_samples}; the "
                "samples of a prompt decode together, so decode_samples must be at least samples"
            )
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> "RunConfig":
        """Check rules over several fields; each message names the fields, both values and the rule."""
        rollout, model, plane = self.rollout, self.model, self.data_plane
        if rollout.max_publish_lag is not None and rollout.max_publish_lag > rollout.max_staleness:
            raise ValueError(
                f"rollout.max_publish_lag is {rollout.max_publish_lag} and rollout.max_staleness "
                f"{rollout.max_staleness}; the lag must be at most the staleness, or groups are born stale"
            )
        if rollout.min_live > rollout.group_size:
            raise ValueError(
                f"rollout.min_live is {rollout.min_live} and rollout.group_size {rollout.group_size}; "
                "min_live must be at most group_size"
            )
        if rollout.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature is {rollout.temperature:g}; logits are divided by it, and stay finite from "
                f"{MIN_TEMPERATURE:g} on"
            )
        if self.collector.decode_samples < rollout.group_size + rollout.oversample:
            more = f" and rollout.oversample {rollout.oversample}" if rollout.oversample else ""
            raise ValueError(
                f"collector.decode_samples is {self.collector.decode_samples}, rollout.group_size "
                f"{rollout.group_size}{more}; a group decodes together, so decode_samples must be at least "
                f"{'their sum' if more else 'group_size'}"
            )
        if model.path is None and model.hidden_size % model.heads:
            raise ValueError(f"model.heads is {model.heads}; it must divide model.hidden_size {model.hidden_size}")
        if model.path is None and model.hidden_size // model.heads % 2:
            raise ValueError(
                f"model.heads is {model.heads} and model.hidden_size {model.hidden_size}; a head has "
                f"{model.hidden_size // model.heads} dimensions, and rotary positions need an even number of them"
            )
        if self.trainer.longest_sample <= self.longest_response:
            multiple = f" in multiples of trainer.align {self.trainer.align}" if self.trainer.align > 1 else ""
            raise ValueError(
                f"trainer.micro_batch_tokens is {self.trainer.micro_batch_tokens}; it must hold a whole sample, "
                f"more than {self.longest_option} {self.longest_response}{multiple}"
            )
        if not self.trainer.balance and self.trainer.micro_batch_order != "costliest_first":
            raise ValueError(
                f"trainer.balance is false and trainer.micro_batch_order {self.trainer.micro_batch_order}; "
                "without balancing samples keep their order, so micro_batch_order must be costliest_first"
            )
        if self.trainer.forward_budget < self.trainer.micro_batch_tokens:
            raise ValueError(
                f"trainer.forward_tokens is {self.trainer.forward_tokens} and trainer.micro_batch_tokens "
                f"{self.trainer.micro_batch_tokens}; forward_tokens must be at least micro_batch_tokens, or null"
            )
        # A group in training may be split over all ranks, each of which writes a row for each later column.
        written = (
            self.trainer.later_column_count * rollout.groups_per_step * min(self.trainer.ranks, rollout.group_size)
        )
        more = f", and columns that the ranks write {written} more" if written else ""
        if plane.capacity_rows is not None and plane.capacity_rows < self.run_ahead_groups + written:
            raise ValueError(
                f"data_plane.capacity_rows is {plane.capacity_rows}; run-ahead needs at least "
                f"(max_staleness + 1) * groups_per_step = {self.run_ahead_groups}{more}"
            )
        for entry in self.filters:
            if not isinstance(entry.get("name"), str):
                raise ValueError(f"filters: each entry needs a name, a string; got {entry}")
        reward_entries(self.reward.functions)
        return self
