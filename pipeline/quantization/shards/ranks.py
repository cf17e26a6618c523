"""The processes of one quantize job, on one or several machines: who does which part, and whether one has
failed.

The processes share the output folder, which holds all finished work; torch.distributed's key-value store
carries only turns, counts and digests. No collective is used, so none can hang: a waiting process checks
whether another one has failed or become silent. A single process runs the same code over its own store.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import click
import torch
from torch.distributed import HashStore, PrefixStore, Store

from ....base.errors import UserError

T = TypeVar("T")

POLL_SECONDS = 0.05
BEAT_SECONDS = 1.0
SILENT_SECONDS = 120.0
"""A process that has given no sign of life for this many seconds counts as dead."""
LEAVE_SECONDS = 5.0
FAULT = 70
"""The exit status of a fault that is not the user's: EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130
FAILED = "failed"
GO_ON = "run the same command again: finished shards are kept"


class OtherRankFailed(click.exceptions.Exit):
    """Raised if another process of the job has failed and reports its error: this process ends silently, with
    the same status.
    """

    def __init__(self, message: str, status: int):
        super().__init__(status)
        self.args = (message,)


class RankLost(click.ClickException):
    """A process is gone and could not say why."""

    exit_code = FAULT


class Ranks:
    """This process of a job, and its rank among the `size` processes of the job. All processes must call the
    methods of this class in the same order.
    """

    def __init__(self, store: Store, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        call = store.add(f"calls of {rank}", 1)
        self._store = PrefixStore(f"quantize {call}", store)
        self._beats: dict[int, tuple[int, float]] = {}

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """If one process ends with an error, all processes end, with its reason; at the end all leave
        together.
        """
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        if self.size > 1:
            beat.start()
        try:
            yield
            self.meet("the end")
            self._leave()
        except (OtherRankFailed, RankLost):
            raise
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            ended.set()
            if self.size > 1:
                # Python aborts if it ends while a thread is inside PyTorch's store.
                beat.join(LEAVE_SECONDS)

    def deal(self, what: str, steps: Sequence[T], cost: Callable[[T], int]) -> Iterator[T]:
        """Yield the steps of this process: a free process takes the most expensive step that is left.

        A single process takes the steps in order. All processes must pass the same steps.
        """
        ordered = steps if self.size == 1 else sorted(steps, key=cost, reverse=True)
        while (index := self.count(f"{what} dealt", 1) - 1) < len(ordered):
            yield ordered[index]

    def count(self, what: str, more: int) -> int:
        """Add to a count that all processes share; return the new value. An error is raised if another
        process has failed.
        """
        with self._reaching():
            self._refuse_failed()
            return self._store.add(what, more)

    def in_turn(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` in the first process and then in the others, which find the results of the first in the
        folder.
        """
        if not self.is_first:
            self._wait(lambda: self._store.check([what]))
            return work()
        done = work()
        with self._reaching():
            self._store.set(what, "done")
        return done

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the `value` of every process, which JSON can hold, in the order of the ranks."""
        with self._reaching():
            self._store.set(f"{what} of {self.rank}", json.dumps(value))
        keys = [f"{what} of {rank}" for rank in range(self.size)]
        self._wait(lambda: self._store.check(keys))
        with self._reaching():
            return [json.loads(self._store.get(key)) for key in keys]

    def meet(self, what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until all processes have made this call; `meanwhile` is called from time to time."""
        self.count(f"{what} reached", 1)

        def all_here() -> bool:
            meanwhile()
            return self._store.add(f"{what} reached", 0) >= self.size

        self._wait(all_here)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._reaching():
            while not ready():
                self._refuse_failed()
                self._refuse_silent()
                time.sleep(POLL_SECONDS)

    def _refuse_failed(self) -> None:
        if self.size > 1 and self._store.check([FAILED]):
            reason = json.loads(self._store.get(FAILED))
            raise OtherRankFailed(f"process {reason['rank']}: {reason['message']}", reason["status"])

    def _refuse_silent(self) -> None:
        now = time.monotonic()
        for rank in range(self.size):
            beats = self._store.add(f"beats of {rank}", 0)
            before, since = self._beats.get(rank, (-1, now))
            self._beats[rank] = beats, since if beats == before else now
            if rank != self.rank and now - since > SILENT_SECONDS and beats == before:
                raise RankLost(
                    f"process {rank} of {self.size} has not been heard of for {SILENT_SECONDS:.0f} s; {GO_ON}"
                )

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_SECONDS):
            try:
                self._store.add(f"beats of {self.rank}", 1)
            except RuntimeError:
                return

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, click.ClickException):
            status = 2 if error.exit_code == 1 else error.exit_code
            message = error.format_message()
        else:
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAULT
            message = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):
            reason = {"rank": self.rank, "message": message, "status": status}
            # The first reason stands: the others may follow from it.
            self._store.compare_set(FAILED, "", json.dumps(reason))

    def _leave(self) -> None:
        """Leave the job. The first process leaves last, since it may hold the store."""
        with suppress(RuntimeError):
            left = self._store.add("left", 1)
            deadline = time.monotonic() + LEAVE_SECONDS
            while self.is_first and left < self.size and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                left = self._store.add("left", 0)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, OtherRankFailed):
                raise
            raise RankLost(
                f"process {self.rank} has lost the others ({str(error).splitlines()[0]}); {GO_ON}"
            ) from error


def join_ranks() -> Ranks:
    """Return the job for which torchrun, or our own launcher, has started this process; otherwise a job by
    itself.

    Read from torchrun's environment. Raise UserError if the other processes cannot be reached.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Ranks(HashStore())
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(iter(rendezvous("env://")))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and the other processes cannot be reached "
            f"({str(error).splitlines()[0]}); start the job with torchrun, or unset WORLD_SIZE"
        ) from error
    return Ranks(store, rank, size)


def local_device(device: str | torch.device | None, ranks: Ranks) -> str | torch.device | None:
    """Return `device`, or this process's own GPU of the machine if `device` names no number.

    The result is None if the device is left open (`auto`).
    """
    device = None if device == "auto" else device
    if ranks.size == 1 or str(device or "cuda") != "cuda" or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
