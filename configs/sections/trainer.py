"""The ranks, their loss and optimizer, and how weights travel."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import (
    Count,
    Factor,
    Few,
    Fraction,
    Groups,
    LearningRate,
    Seconds,
    Section,
    ZeroOrMore,
)


class Trainer(Section):
    backend: Literal["torch", "megatron"]
    """What trains. `torch`: each rank holds a whole replica of the model, as transformers has it, or with `sharding` a
    part of one; `megatron`: Megatron-LM's model and optimizer, which divide a replica over ranks (docs/megatron.md;
    scripts/install megatron)."""
    ranks: Few
    """Processes that train. Each replica of the model takes `tensor_parallel` times `pipeline_parallel` of them; the
    replicas share a batch."""
    sharding: Literal["none", "full", "hybrid"]
    """With the backend torch, who keeps what. `none`: every rank keeps the whole model. `full`: weights, gradients and
    moments are cut into one part per rank (FSDP2), and layers are gathered where they run. `hybrid`: groups of
    `shard_ranks` ranks keep a model each."""
    shard_ranks: Few | None
    """With `sharding: hybrid`, how many ranks keep a model together, such as those of one host. They are ranks in a
    row: with 2 the ranks 0 and 1, then 2 and 3. It divides `ranks`, and is neither 1 nor all of them."""
    reshard_after_forward: bool | None
    """With `sharding`, free each layer after each of its passes, and gather it again for the next one. Off: layers stay
    whole from the first micro-batch of an update to its last, which is faster and takes the memory of the whole model.
    null: off where that is a tenth of a GPU's memory or less."""
    tensor_parallel: Few
    """Ranks over which each matrix of a layer is divided. More than 1 needs the backend megatron."""
    pipeline_parallel: Few
    """Ranks over which the layers are divided, each a stage. More than 1 needs the backend megatron."""
    expert_parallel: Few
    """Replicas over which the experts of a mixture are divided; each keeps a whole of the rest. More than 1 needs the
    backend megatron."""
    context_parallel: Few
    """Ranks over which each sample is divided. Only 1 is accepted: Megatron needs Transformer Engine for more."""
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
    broadcasts; `auto`: `leader` if there are such siblings. Without them (`tensor_parallel` and `pipeline_parallel` 1)
    only `auto` is accepted."""
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
    packed: bool | None
    """Run a micro-batch as one packed row without padding, in which a sample sees itself alone, instead of padded rows.
    null: where a kernel for varying lengths runs (on GPUs in bfloat16), if the model's layers keep samples apart."""
    router_replay: bool
    """Train a mixture of experts with the experts that were chosen while sampling, token by token (R3, arXiv
    2510.11370). Needs a Mixtral or Qwen3-MoE and the native engine, which then decodes without `collector.compile`;
    prompts are not shared (`share_prompts`)."""
    share_prompts: bool
    """Compute the prompt of a group's samples once per micro-batch, in padded rows, where that saves half of the
    positions or more. Models with sliding windows, or whose layers would mix the samples, do not, nor does the backend
    megatron."""
    loss_normalisation: Literal["token_mean", "sequence_mean", "constant"]
    """How the loss is averaged. `token_mean`: over all tokens of the batch (DAPO); `sequence_mean`: over each sample's
    tokens, then over samples (GRPO); `constant`: the sum divided by samples times max_new_tokens (Dr. GRPO)."""
    over_budget: Literal["mask", "error"]
    """What a sample longer than the budget does. `mask`: it is masked (over_budget); `error`: it ends the run."""
    learning_rate: LearningRate
    """AdamW's learning rate, at its highest."""
    lr_schedule: Literal["constant", "linear", "cosine"]
    """The learning rate after the warm-up. `constant`: it stays; `linear` and `cosine`: it falls to nearly 0 in step
    `lr_total_steps`, by a line or half a cosine."""
    lr_warm_up_steps: ZeroOrMore
    """The learning rate rises by equal parts over so many steps; 0: no warm-up. The supervised steps have none."""
    lr_total_steps: Count | None
    """The step in which a falling learning rate is lowest; later steps keep it. null: `run.steps`."""
    beta1: Fraction
    """AdamW's decay of the first moment."""
    beta2: Fraction
    """AdamW's decay of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)]
    """AdamW's decoupled weight decay, of matrices and embeddings."""
    decay_vectors: bool
    """Let weights of one dimension (norms and biases) decay too."""
    activation_checkpointing: bool
    """Compute the activations of each layer again in the backward pass instead of keeping them: less memory, and a
    third more time."""
    compile: bool
    """Fuse decoder layers and the loss with torch.compile on GPUs; the first step of a run then takes about a minute
    longer. Nothing is compiled on a CPU, nor with `router_replay`, nor by the backend megatron."""
    precision: Literal["autocast", "bf16_weights"]
    """How the model computes in `model.dtype` bfloat16. `autocast`: weights are float32, and operations round them.
    `bf16_weights`: weights and activations are bfloat16, which takes less memory and time; the optimizer updates
    float32 masters, and the gradients of micro-batches, each in bfloat16, are added up in float32. The backend megatron
    always has bfloat16 weights then, and `precision` stays at its default."""
    offload_optimizer: bool
    """Keep the float32 masters and AdamW's moments in the host's memory, and update them there: 12 bytes per weight
    less on the GPU, and a slower update."""
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
    def replica_ranks(self) -> int:
        """How many ranks hold one replica of the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def replicas(self) -> int:
        """How many data-parallel replicas there are: what a batch is planned for."""
        return self.ranks // self.replica_ranks

    @property
    def packs(self) -> bool:
        """Whether micro-batches are packed rows; at `null` they are not, until a run's start has chosen."""
        return self.packed is True

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks keep a model together by FSDP2."""
        return self.sharding != "none"

    @property
    def passes_together(self) -> bool:
        """Whether a rank's pass needs those of other replicas, which hold weights of its own."""
        return self.is_sharded or self.expert_parallel > 1

    @property
    def model_ranks(self) -> int:
        """How many ranks keep a model together."""
        return {"none": 1, "full": self.ranks, "hybrid": self.shard_ranks or 1}[self.sharding]

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
