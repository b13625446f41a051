"""The append-only record of a run; everything after the fact is a fold over it."""
