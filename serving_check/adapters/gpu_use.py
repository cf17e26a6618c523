"""How busy GPUs are, as NVIDIA's library tells; not which process keeps them busy."""

from collections.abc import Sequence

import torch


def gpu_use(gpus: Sequence[int]) -> float | None:
    """The largest share of the driver's last sampling period in which one of them computed, 0 to 1.

    A period is a second at most. None without GPUs, or if `pynvml` is not installed.
    """
    try:
        return max((torch.cuda.utilization(gpu) / 100 for gpu in gpus), default=None)
    except ImportError:
        return None
