"""The filters that come with asyncrl, one per file."""
