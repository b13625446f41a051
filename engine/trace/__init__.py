"""What can be done with an event log after the run: replay it, ask what-if, prove it, cut it, count it."""
