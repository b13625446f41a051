"""Generators: what turns prompts into tokens."""
