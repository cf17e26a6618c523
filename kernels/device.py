"""Properties of the device that kernels run on."""

import functools

import torch


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The capability is (0, 0) under the interpreter. PTX converts e4m3 from (8, 9) on, launches overlap from
    (9, 0) on.
    """
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def keeps_sums_in_registers(capability: tuple[int, int]) -> bool:
    """Whether Triton multiplies by mma.sync, whose operands and sums all lie in registers.

    Hopper (wgmma) and Blackwell's data center GPUs (tcgen05) read operands from shared memory instead.
    """
    return capability[0] not in (9, 10)
