"""Tasks: prompts and rewards."""

from asyncrl.collectors.tasks.base import Reward, Task
from asyncrl.collectors.tasks.load import load_task
from asyncrl.collectors.tasks.prompts import list_examples, list_prompts

__all__ = ["Reward", "Task", "list_examples", "list_prompts", "load_task"]
