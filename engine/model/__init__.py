"""The model and its tokenizer, shared by generators and trainer ranks."""
