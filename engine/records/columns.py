"""Columns of a training group's row, one value a sample.

Every put brings `tokens`: prompt and response ids, int32 (L); and `logprobs`: behaviour
log-probabilities of the response at the sampling temperature, float32 (response tokens).

Later columns, written by the ranks and shaped like `logprobs`: `trainer_logprobs`, under the weights
at the start of the batch; `reference_logprobs`, under the frozen reference model.
"""

TOKENS = "tokens"
LOGPROBS = "logprobs"
COLUMNS = (TOKENS, LOGPROBS)
TRAINER_LOGPROBS = "trainer_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"
