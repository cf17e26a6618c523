"""Recipes, quantizers, checkpoint conventions, publishing, and the command line."""

import logging
import os

from .machine.cores import model_threads

# Threads that wait for one another by spinning starve whatever shares their cores, such as the baseline's
# server and the clients of both: with two cores and three such processes a decode step took six times as
# long. Both have to be set before torch loads OpenMP; what the user has set stands.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", str(model_threads()))

# Importing torchao, which transformers does, warns about CUDA extensions that this machine cannot load and
# about a deprecation inside torch: nothing a user can act on, in every process and every server's log.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
