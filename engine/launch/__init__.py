"""Job files that start a Ray cluster on many nodes, and train on it."""
