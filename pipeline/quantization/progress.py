"""The bar that a quantize job shows over bytes read."""

from tqdm import tqdm


def byte_bar(total: int, what: str, progress: bool, done: int = 0) -> tqdm:
    return tqdm(
        total=total, initial=done, desc=what, unit="B", unit_scale=True, disable=None if progress else True
    )
