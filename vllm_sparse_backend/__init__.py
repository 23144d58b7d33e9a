"""sparse-prefill: a vLLM attention backend that prefills long prompts sparsely, without training."""
