"""Inference servers reached over HTTP: vLLM's and SGLang's."""
