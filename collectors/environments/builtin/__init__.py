"""Environments that come with asyncrl."""
