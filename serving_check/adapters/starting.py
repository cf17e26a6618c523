"""Starts servers while something else is done, and stops them in any case.

`Server.start` starts one server; this file has only the threads that wait for servers.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from .endpoint import Endpoint
from .engine import Server
from .subprocess_endpoint import SubprocessEndpoint

POLL_SECONDS = 0.1


@contextmanager
def starting(servers: Sequence[Server], together: bool) -> Iterator[Callable[[], list[Endpoint]]]:
    """Start `servers` in the background; yield a function that waits until all serve and returns their
    endpoints.

    The yielded function raises the error of the first server that failed. At the end all servers are stopped,
    also those that are still starting.

    together: start all servers at once rather than one after the other
    """
    with ThreadPoolExecutor(len(servers) if together else 1) as threads:
        starts = [threads.submit(server.start) for server in servers]
        try:
            yield lambda: _endpoints(starts)
        finally:
            for start in starts:
                start.cancel()
            with ThreadPoolExecutor(len(servers)) as stops:
                list(stops.map(_stop, servers, starts))


def restart(servers: Sequence[SubprocessEndpoint], together: bool) -> None:
    """End all servers and start them again at their addresses; `together` as in `starting`."""
    with ThreadPoolExecutor(len(servers) if together else 1) as threads:
        for done in [threads.submit(server.restart) for server in servers]:
            done.result()


def _endpoints(starts: Sequence[Future[Endpoint]]) -> list[Endpoint]:
    done, _ = wait(starts, return_when=FIRST_EXCEPTION)
    for start in done:
        start.result()
    return [start.result() for start in starts]


def _stop(server: Server, start: Future[Endpoint]) -> None:
    """Stop a server. It may be about to start its process, so it is stopped again when `start` has ended."""
    server.stop()
    while not wait([start], POLL_SECONDS).done:
        server.stop()
    server.stop()
