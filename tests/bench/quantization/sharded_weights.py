"""Checkpoints of random weights in shards of 4 GiB that several threads write: large ones, quickly.

One thread writes .65 GB a second, and one thread hashes a file, where several files are hashed at once. The
files are named as transformers names them, and have an index also where there is one shard.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.checkpoints.checkpoint import INDEX_NAME
from scalegate.pipeline.quantization.shards.shard_writer import ShardWriter, header_room
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

SHARD_BYTES = 4 << 30
WRITERS = 8
PIECE = 8 << 20
"""Elements copied from a GPU at a time: so little memory is used again, a large tensor's is new each time."""
METADATA = {"format": "pt"}


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """As `save_pretrained` does: config, generation config and weights, the tied ones once."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Experts lie in one tensor in memory, in one each in files.
    write_weights(folder, revert_weight_conversion(model, weights_of(model)))


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """By name, each once, under the first of its names where weights are tied."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    made: Callable[[Tensor], Tensor] = lambda weight: weight,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write shards and index; the number of shards.

    made: makes what is written of each of `weights`, just before: these may be on the meta device
    """
    shards = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )

    files = shards.filename_to_tensors

    def write(file: str, names: list[str]) -> None:
        with ShardWriter(folder / file, header_room(names, METADATA), METADATA) as writer:
            for name in names:
                weight = made(weights[name])
                writer.add_chunks(name, weight.dtype, tuple(weight.shape), on_the_host(weight))

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, files, files.values()))
    index = {"metadata": {"total_size": bytes_of(weights)}, "weight_map": shards.tensor_to_filename}
    write_json(folder / INDEX_NAME, index)
    return len(files)


def on_the_host(weight: Tensor) -> Iterator[Tensor]:
    return (piece.cpu() for piece in weight.reshape(-1).split(PIECE))


def bytes_of(weights: Mapping[str, Tensor]) -> int:
    return sum(weight.nbytes for weight in weights.values())
