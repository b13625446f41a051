"""Columns of a training group's row, one value a sample.

`tokens`: prompt and response ids, int32 (L). `logprobs`: behaviour log-probabilities of the
response at the sampling temperature, float32 (response tokens).
"""

TOKENS = "tokens"
LOGPROBS = "logprobs"
COLUMNS = (TOKENS, LOGPROBS)
