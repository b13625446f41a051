"""The rewards that come with asyncrl, one per file."""
