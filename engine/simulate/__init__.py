"""Predicts the ages and throughput of a configuration: the real loop in virtual time, with simulated parts."""
