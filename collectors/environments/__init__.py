"""Environments: responses of several turns, between which the world answers and tools run."""

from asyncrl.collectors.environments.base import Environment, Step, Turn
from asyncrl.collectors.environments.load import load_environment
from asyncrl.collectors.environments.tools import Tool

__all__ = ["Environment", "Step", "Tool", "Turn", "load_environment"]
