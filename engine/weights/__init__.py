"""Transports of weights from trainer to generators."""
