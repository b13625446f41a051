"""For tests: virtual time, and fakes for generator, task and trainer ranks around the real controller."""
