"""Asynchronous reinforcement learning for language models, with bounded staleness."""

__version__ = "0.1.0"
