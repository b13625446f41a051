"""The sections of the configuration, with the meaning of every field."""
