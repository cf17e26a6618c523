"""compressed-tensors: the convention of vLLM, SGLang and llm-compressor, with a file for each scheme."""
