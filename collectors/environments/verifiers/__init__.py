"""Environments of the package verifiers, whose rollouts ask the model at the address that records their tokens."""
