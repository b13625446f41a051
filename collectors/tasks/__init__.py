"""Tasks: prompts and rewards."""

from asyncrl.collectors.tasks.base import Reward, Task
from asyncrl.collectors.tasks.load import load_task

__all__ = ["Reward", "Task", "load_task"]
