"""Tasks: prompts and rewards."""

from asyncrl.collectors.tasks.base import Reward, Task
from asyncrl.collectors.tasks.load import load_task
from asyncrl.collectors.tasks.prompts import list_examples, list_prompts
from asyncrl.collectors.tasks.response import Response

__all__ = ["Response", "Reward", "Task", "list_examples", "list_prompts", "load_task"]
