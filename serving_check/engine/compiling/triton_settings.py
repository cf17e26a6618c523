"""Triton's settings as torch's compiler leaves them, made before the first kernel is compiled.

Inductor names a ptxas and a libdevice of torch's when it compiles, and does not where it finds all it needs
in its cache. Both are part of what Triton files kernels under, so ours would be compiled again by the second
process that starts.
"""


def settle() -> None:
    """Make them now, whatever will be found in a cache."""
    # Imported here: a compiler takes seconds to load.
    from torch._inductor.runtime import compile_tasks

    for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
        # Torch's own, of which a release may have neither.
        make = getattr(compile_tasks, name, None)
        if make is not None:
            make()
