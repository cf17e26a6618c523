"""Recipes, quantizers, checkpoint conventions, publishing, and the command line."""

import logging

# Importing torchao, which transformers does, warns about CUDA extensions that this machine cannot load and
# about a deprecation inside torch: nothing a user can act on, in every process and every server's log.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
