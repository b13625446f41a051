"""The project's own conformance suite: contracts, invariants, random schedules. Users need engine.testing alone."""
