"""torch's compiler, imported in a thread while weights are read: it takes a second, and GPU engines need it.

Not for compiling (`compiled_layers.py`). Nothing that loads a model imports modules of the compiler, so no
two threads import the same ones.
"""

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def importing_compiler(wanted: bool) -> Iterator[None]:
    """While open, the import goes on beside what is inside; it has ended when this is closed."""
    thread = threading.Thread(target=_import, name="import-compiler") if wanted else None
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


def _import() -> None:
    # Whoever compiles imports it again, and is told why that fails.
    with contextlib.suppress(Exception):
        import torch._inductor.compile_fx  # noqa: F401
