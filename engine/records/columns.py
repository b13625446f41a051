"""Columns of a training group's row, with one value per sample.

Every put brings `tokens`: prompt and response ids, int32 (L); and `logprobs`: behaviour
log-probabilities of the response at the sampling temperature, float32 (response tokens); 0 at tokens that were not
sampled (records/generated.py).

Later columns, written by the ranks and shaped like `logprobs`: `trainer_logprobs`, under the weights
at the start of the batch; `reference_logprobs`, under the frozen reference model.

A task may declare extras: more columns that every put brings, one tensor per sample, of any shape. Ranks always read
them and pass them to the model by name.

With `trainer.router_replay` every put brings `routed_experts`: the experts chosen for each token of prompt and
response, int16 (L, layers, k), -1 where none is known. It travels as extras do.
"""

TOKENS = "tokens"
LOGPROBS = "logprobs"
COLUMNS = (TOKENS, LOGPROBS)
ROUTED_EXPERTS = "routed_experts"
TRAINER_LOGPROBS = "trainer_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"

# Names that an extra cannot have: the columns, and arguments that the model is given anyway.
_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "use_cache")
TAKEN = frozenset({*COLUMNS, ROUTED_EXPERTS, TRAINER_LOGPROBS, REFERENCE_LOGPROBS, *_ARGUMENTS})


def check_extra(name: str) -> None:
    """ValueError if an extra cannot have this name."""
    if not name.isidentifier() or name in TAKEN:
        raise ValueError(
            f"an extra cannot be called {name!r}: it must be an identifier, and not one of {', '.join(sorted(TAKEN))}"
        )
