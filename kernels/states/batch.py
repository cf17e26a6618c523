"""Which tokens of a step belong to which request, as kernels over states read it on the device.

Request r has tokens query_start_loc[r] .. query_start_loc[r + 1] of the step, which are the last ones of its
seq_lens[r] tokens. The number of tokens says which kernel computes a request:

    seq_lens[r] == 0     padding: no state changes, and outputs are zeros
    one token            `step`
    more                 `scan`, which only a step with prompts launches

The state before a request's first token is zeros, whatever its slot holds. CUDA graphs replay launches, so
nothing here depends on the host but the shapes of the tensors.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class StateBatch:
    """A step's R requests."""

    query_start_loc: Tensor
    """int32 [R + 1]."""
    seq_lens: Tensor
    """int32 [R]: the length of each request's context with this step's tokens; 0 for padding."""
    request_rows: Tensor
    """int64 [R]: each request's slot; out of range for padding."""
    decode_only: bool
    """Whether no request has more than one token. Then request r has token r."""
