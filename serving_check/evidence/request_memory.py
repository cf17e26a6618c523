"""What a server keeps in memory for each request: pages of keys and values, and states of recurrent layers.

Data only. `engine/kv_pool.py` allocates this memory, and `checks/kv_capacity.py` reads its size from
`/metrics`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..settings import DOCUMENTED


@dataclass(frozen=True)
class RequestMemory:
    """Bytes of all layers together."""

    __pydantic_config__ = DOCUMENTED

    page_size: int
    """Tokens in a page."""
    page_bytes: int
    """Bytes of a page of keys and values."""
    row_bytes: int
    """Bytes of a request besides pages and states, such as tokens that a KV format keeps in 16 bits."""
    states: Mapping[str, int]
    """Bytes of a request's states, however long it is, by state format and dtype, as `mamba2 float32`."""

    @property
    def state_bytes(self) -> int:
        return sum(self.states.values())

    def of_request(self, tokens: int) -> int:
        """Return the bytes of a request with that many tokens, prompt and answer together."""
        return -(-tokens // self.page_size) * self.page_bytes + self.row_bytes + self.state_bytes
