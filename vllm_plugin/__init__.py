"""Scalegate's kernels inside vLLM: a plugin in the wheel `scalegate-kernels`, which vLLM finds by itself.

    register.py     the entry point: whether the plugin serves at all
    speed.py        which layers it serves: those for which measurements say that it is faster
    choice.py       which of our layouts serves a layer
    int_linear.py   INT4 and INT8 layers (compressed-tensors, GPTQ, AWQ)
    nvfp4_linear.py NVFP4 layers with 16-bit activations
    experts.py      layers of INT4 and NVFP4 experts
    experts_product.py  their products, the activation and the weighted sum
    serving.py      what these have in common
    stored.py       vLLM's tensors of a layer as a weight of ours
    product.py      the product as an op of vLLM's graphs
    warm_up.py      compiles all that a layer will need, before vLLM serves
    compile_ahead.py  has other processes do that while vLLM loads the weights
    compiler.py     what these processes run
    pdl.py          lets vLLM's other kernels launch ours early
    cache_key.py    what vLLM's compile cache must depend on
    attention.py    an attention backend for keys and values in `int4_per_token_head`
    int4_pages.py   its pages in vLLM's memory, and what its steps compute
    interface.py    all that is vLLM's, but for attention
    attention_interface.py  the same for attention

Of the other folders only `sglang_plugin/` imports this one; vLLM and `packaging/kernels/` do, too.
"""
