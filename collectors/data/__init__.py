"""Data: prompts from files, read one by one, in an order that needs no list of them."""
