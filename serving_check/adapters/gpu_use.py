"""How busy GPUs are, from NVIDIA's library, which does not tell which process keeps them busy."""

from collections.abc import Sequence

import torch


def gpu_use(gpus: Sequence[int]) -> float | None:
    """Return the largest share, 0 to 1, of the driver's last sampling period in which one of the GPUs
    computed.

    A period is a second at most. The result is None without GPUs, or if `pynvml` is not installed.
    """
    try:
        return max((torch.cuda.utilization(gpu) / 100 for gpu in gpus), default=None)
    except ImportError:
        return None
