"""Collectors: granted groups in, whole scored groups out to the data plane."""
