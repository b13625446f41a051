"""The configuration: frozen sections with the meaning of every field.

No field has a default here: `presets/default.yaml` is the one source of defaults.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Run(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seed of everything random: weights, prompt order, sampling."""
    runtime: Literal["ray", "local"]
    """`ray`: actors and TransferQueue; `local`: the same loop in one process."""
    steps: Count | None
    """End after this many training steps; null: no such limit."""
    batches: Count | None
    """End after this many batches judged, those without a survivor included; null: no such limit."""
    stop_at_reward: float | None
    """End when the mean reward of the last `reward_window` batches judged reaches this; null: never."""
    reward_window: Count
    """Batches over which `stop_at_reward` averages."""
    directory: str | None
    """Where event log, logs and summary go; null: a new folder under `runs/`."""


class Model(Section):
    path: str | None
    """A Hugging Face checkpoint folder; null: a small Llama-shaped model from random weights."""
    hidden_size: Count
    """Width of the small model."""
    layers: Count
    """Layers of the small model."""
    heads: Count
    """Attention heads of the small model; they divide `hidden_size`."""
    intermediate_size: Count
    """Width of the small model's feed-forward layers."""


class Task(Section):
    name: str
    """`echo`, `reverse`, or `module:Class` of your own task."""
    epochs: Count | None
    """Passes over the task's prompts; null: no end."""
    options: dict[str, Any]
    """Keyword arguments of the task's class."""


class Rollout(Section):
    max_staleness: Annotated[int, Field(ge=0)]
    """Largest age, in versions, of any token that is trained on; 0 is synchronous training."""
    max_publish_lag: Annotated[int, Field(ge=0)] | None
    """No step starts while the newest version all generators serve lags by more; null: min(1, max_staleness)."""
    groups_per_step: Count
    """Groups of one training batch."""
    group_size: Annotated[int, Field(ge=2)]
    """Samples of one prompt."""
    min_live: Annotated[int, Field(ge=2)]
    """A group with fewer samples that have a finite reward is dropped."""
    temperature: Annotated[float, Field(gt=0)]
    """Sampling temperature; log-probabilities are those of the tempered distribution."""
    max_new_tokens: Count
    """Longest response, in tokens."""


class Collector(Section):
    count: Count
    """Collector actors, each with its own generator."""
    decode_samples: Count
    """Samples that decode together at most."""
    group_timeout_s: Seconds
    """A group that takes longer to generate and score has failed (reason `timeout`)."""
    put_timeout_s: Seconds
    """How long a refused put is retried before the run ends."""
    on_error: Literal["skip", "abort"]
    """A group that fails: count it and go on, or end the run."""
    max_failures_in_a_row: Count
    """With `skip`, end the run after this many failed groups without a good one between."""
    threads: Count
    """Torch threads of each collector."""


class Trainer(Section):
    ranks: Count
    """Data-parallel ranks."""
    micro_batch_tokens: Count
    """Token budget of one micro-batch."""
    over_budget: Literal["mask", "error"]
    """A sample longer than the budget: masked(over_budget), or the run ends."""
    learning_rate: Annotated[float, Field(gt=0)]
    """AdamW's step size."""
    beta1: Fraction
    """AdamW's decay of the first moment."""
    beta2: Fraction
    """AdamW's decay of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)]
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)]
    """Gradients are scaled down to this global norm."""
    clip_low: Fraction
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)]
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)]
    """With a negative advantage, the loss of a token is at most this times its size."""
    advantage_baseline: Literal["mean", "leave_one_out"]
    """What a reward is compared with: the group's mean, or the mean of its siblings."""
    advantage_scale: Literal["std", "none"]
    """Divide advantages by the group's standard deviation, or not."""
    warm_up_steps: Annotated[int, Field(ge=0)]
    """Supervised steps on the task's own examples before version 0."""
    warm_up_batch: Count
    """Examples of one supervised step."""
    warm_up_learning_rate: Annotated[float, Field(gt=0)]
    """AdamW's step size in the supervised steps."""
    step_timeout_s: Seconds
    """A training step that takes longer ends the run."""
    publish_timeout_s: Seconds
    """A publish that is not acknowledged by then has failed."""
    publish_tries: Count
    """Tries to publish one version before the run ends."""
    threads: Count
    """Torch threads of each rank."""


class DataPlane(Section):
    storage_units: Count
    """TransferQueue storage processes."""
    capacity_rows: Count | None
    """Rows (groups) that the store takes; null: no limit. Run-ahead needs (max_staleness + 1) · groups_per_step."""
    deadline_s: Seconds
    """Longest wait for one answer of the data plane."""
    lease_s: Seconds
    """A claim that is neither settled nor renewed for so long is given back, whoever holds it."""
    poll_s: Seconds
    """The slow poll behind the put notices; its hits are counted."""


class Supervision(Section):
    start_timeout_s: Seconds
    """Longest start of all actors together."""
    answer_timeout_s: Seconds
    """An actor that has answered nothing for so long is taken for dead."""
    starve_timeout_s: Seconds
    """Longest wait for the next group, with a trainer idle; then the run ends."""
    stop_timeout_s: Seconds
    """Longest orderly stop; then actors are killed."""


class RunConfig(Section):
    """Everything a run is told. `filters` lists the chain in order: a name or module:Class, and parameters."""

    run: Run
    model: Model
    task: Task
    rollout: Rollout
    collector: Collector
    filters: list[dict[str, Any]]
    trainer: Trainer
    data_plane: DataPlane
    supervision: Supervision

    @property
    def run_ahead_groups(self) -> int:
        """Groups that may be dispatched before their capacity comes back."""
        return (self.rollout.max_staleness + 1) * self.rollout.groups_per_step

    @property
    def max_publish_lag(self) -> int:
        lag = self.rollout.max_publish_lag
        return min(1, self.rollout.max_staleness) if lag is None else lag

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
        if self.collector.decode_samples < rollout.group_size:
            raise ValueError(
                f"collector.decode_samples is {self.collector.decode_samples} and rollout.group_size "
                f"{rollout.group_size}; a group decodes together, so decode_samples must be at least group_size"
            )
        if model.path is None and model.hidden_size % model.heads:
            raise ValueError(f"model.heads is {model.heads}; it must divide model.hidden_size {model.hidden_size}")
        if self.trainer.micro_batch_tokens <= rollout.max_new_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens is {self.trainer.micro_batch_tokens}; it must hold a whole sample, "
                f"more than rollout.max_new_tokens {rollout.max_new_tokens}"
            )
        if plane.capacity_rows is not None and plane.capacity_rows < self.run_ahead_groups:
            raise ValueError(
                f"data_plane.capacity_rows is {plane.capacity_rows}; run-ahead needs at least "
                f"(max_staleness + 1) * groups_per_step = {self.run_ahead_groups}"
            )
        for entry in self.filters:
            if not isinstance(entry.get("name"), str):
                raise ValueError(f"filters: each entry needs a name, a string; got {entry}")
        return self
