"""Launches that a GPU runs beside others, as a layer's pages that are written while it decodes."""

from collections.abc import Callable

import torch


class SideStream:
    """A second stream of one device; on a CPU, where Triton is interpreted, all runs in turn.

    In a CUDA graph both become branches of it, which `join` has to end.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, launch: Callable[[], None]) -> None:
        """After all that was launched before. Until `join`, nothing may free or change what it reads."""
        if self._stream is None:
            launch()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()

    def join(self) -> None:
        """What is launched from here on waits for both."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
