"""Applies the Triton settings of torch's compiler before the first kernel is compiled.

Inductor sets the paths of torch's ptxas and libdevice when it compiles, but not if it finds everything in its
cache. Triton's cache keys include both paths, so without this module a second process would compile our
kernels again.
"""


def settle() -> None:
    """Apply the settings now, whether or not Inductor will compile anything."""
    # Imported here: a compiler takes seconds to load.
    from torch._inductor.runtime import compile_tasks

    for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
        # Private functions of torch, which a release may not have.
        make = getattr(compile_tasks, name, None)
        if make is not None:
            make()
