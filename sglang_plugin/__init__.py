"""Scalegate's INT4 kernels inside SGLang: a plugin in the wheel `scalegate-kernels`, which SGLang finds by
itself.

    register.py     the entry point: whether the plugin serves at all; SGLang's hooks
    int_linear.py   INT4 layers of compressed-tensors

All else is the vLLM plugin's (`vllm_plugin/`): which layers are served, packing, the product, warm-up. No
other folder imports this one: SGLang and `packaging/kernels/` do.
"""
