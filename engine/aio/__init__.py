"""Waiting: a signal, an outbox, blocking calls, and a clock that skips idle time."""
