"""The loop from prompts to weights: what happens in a step. CONTRIBUTING.md lists its files in order."""
