"""vLLM in the collector's process (the extra `vllm`): the one package that imports vllm."""
