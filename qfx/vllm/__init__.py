"""Models served by vLLM: a quantization method, found through an entry point. Only vLLM imports its
modules, which need it."""
