"""Products whose bits depend on their number of rows, as those of some libraries on some CPUs do.

    python -P drifting_products.py CHECKPOINT [options of `pipeline serve`...]

serves a model with them: the negative control of what is said of batch invariance, and nothing else.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scalegate.layouts.packing.dequantize_once import CpuOneDnn
from scalegate.pipeline.cli.main import main
from torch import Tensor
from torch.nn import functional


@contextmanager
def drifting_products() -> Iterator[None]:
    """The number of rows decides where a sum over K is cut in two. All layers take this product."""
    linear = functional.linear

    def follows_the_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        columns = x.shape[-1]
        cut = 1 + x.numel() // columns % (columns - 1)
        y = linear(x[..., :cut], weight[:, :cut]) + linear(x[..., cut:], weight[:, cut:])
        return y if bias is None else y + bias

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", follows_the_rows)
        patch.setattr(CpuOneDnn, "refuses", lambda layout, problem: "its products do not drift")
        yield


if __name__ == "__main__":
    with drifting_products():
        main(["serve", *sys.argv[1:]], prog_name="drifting_products.py")
