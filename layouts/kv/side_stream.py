"""Launches that run beside others on a GPU, such as writing a layer's pages while it decodes."""

from collections.abc import Callable

import torch


class SideStream:
    """A second stream of one device. On a CPU, where Triton is interpreted, launches run in turn.

    In a CUDA graph the two streams become branches, which `join` must bring together.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, launch: Callable[[], None]) -> None:
        """Run `launch` after everything launched so far. Until `join`, nothing may free or change the memory
        that the launch reads.
        """
        if self._stream is None:
            launch()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()

    def join(self) -> None:
        """Make later launches wait for both streams."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
