"""Agents: a function of the user's that asks the model over HTTP, as a client of OpenAI does, and is trained by it."""
