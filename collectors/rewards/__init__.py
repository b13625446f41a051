"""Reward functions, built in and of the user's: they score the responses to a task that has prompts only."""
