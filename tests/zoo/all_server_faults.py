"""All faults of servers: whoever imports them from here has those of every file."""

from . import servers, servers_as_asked, servers_by_form, servers_in_use  # noqa: F401
from .server_fault import FAULTS, Fault, of

__all__ = ["FAULTS", "Fault", "of"]
