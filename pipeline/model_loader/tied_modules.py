"""Modules whose parameters are all tied to those of another module, such as Zamba's shared attention blocks.

Tied modules become one module: a packed weight that replaces a parameter then serves in both places. Tied
embeddings are left alone, since they are of another class than the head.
"""

from collections.abc import Iterator, Mapping

from transformers import PreTrainedModel


def share_tied_modules(model: PreTrainedModel) -> None:
    """Replace each module whose parameters are all tied to another module's by that module."""
    tied: dict[str, str] = model.all_tied_weights_keys
    for pair in tied.items():
        shared = next((names for names in _modules(*pair) if _are_tied(model, *names, tied)), None)
        if shared is not None:
            model.set_submodule(shared[0], model.get_submodule(shared[1]))


def _modules(target: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the modules in which two parameters have the same name, the largest first."""
    ours, theirs = target.split("."), source.split(".")
    for length in range(min(len(ours), len(theirs)) - 1, 0, -1):
        if ours[-length:] == theirs[-length:]:
            yield ".".join(ours[:-length]), ".".join(theirs[:-length])


def _are_tied(model: PreTrainedModel, target: str, source: str, tied: Mapping[str, str]) -> bool:
    here, there = model.get_submodule(target), model.get_submodule(source)
    return type(here) is type(there) and all(
        tied.get(f"{target}.{name}") == f"{source}.{name}" for name, _ in here.named_parameters()
    )
