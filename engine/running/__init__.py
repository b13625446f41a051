"""What carries a run out, whoever starts it: checks before it, the controller in it, files and figures after it."""
