"""Our passes over the graphs of compiled layers, which run before Inductor plans its kernels.

Inductor accepts a single custom pass, so this file combines our passes, each of which has its own file.
"""

from typing import Any

from torch import fx

from ....base.batch_invariance import TUNED, BatchInvariance
from . import inplace_barriers, own_product_pass, rounding_pass, top_k_pass


def options(batch_invariance: BatchInvariance) -> dict[str, Any]:
    """Return compiler options that run our passes. batch_invariance: the mode to compile for."""
    # Imported here: a compiler takes seconds to load.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Passes(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            top_k_pass.replace_top_k(graph)
            if batch_invariance == TUNED:
                rounding_pass.round_in_place(graph)
            else:
                own_product_pass.replace_products(graph)

        def uuid(self) -> Any:
            """Return part of the compiler's cache key: code from other versions of these files is not
            used.
            """
            passes = (top_k_pass, own_product_pass, rounding_pass, inplace_barriers)
            files = (__file__, *(each.__file__ for each in passes))
            return get_hash_for_files(files, extra=batch_invariance)

    return {"post_grad_custom_pre_pass": Passes()}
