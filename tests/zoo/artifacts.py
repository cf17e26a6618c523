"""Every way in which an artifact has been broken, each with the check that must catch it and what that says.

A fault is a few lines on the copy of a sound artifact, whose manifest is then made to fit the files again, as
whoever meant harm would. `test_artifacts.py` runs them through the checks that need no server, and
`whole_gate.py` through `validate`.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.conventions.compressed_tensors.convention import CONVENTION
from scalegate.pipeline.conventions.modelopt import SIDECAR
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.records.artifact import Artifact, record_files
from torch import Tensor

WEIGHTS = "model.safetensors"
ONE = "model.layers.0.mlp.up_proj"
EMBEDDINGS = "model.embed_tokens.weight"
SLOW_LAYOUT = "cpu_int4_float32"
"""tinygemm's arithmetic: all of a weight dequantized again for every few rows of M."""
SECOND_TEMPLATE = "additional_chat_templates/tool.jinja"
INT4, NVFP4, EXPERTS = "int4", "nvfp4", "experts"


@dataclass(frozen=True)
class ArtifactFault:
    """One fault; `refused` stands for what is not read at all, and so gets no verdict."""

    name: str
    check: str
    words: str
    """In the reason of the check, or in the message of the refusal."""
    apply: Callable[[Path, random.Random], None]
    of: str
    """Which sound artifact it is a fault of."""


FAULTS: dict[str, ArtifactFault] = {}


def fault(check: str, words: str, of: str = INT4) -> Callable[[Callable], Callable]:
    def register(apply: Callable[[Path, random.Random], None]) -> Callable:
        name = apply.__name__.replace("_", " ")
        FAULTS[name] = ArtifactFault(name, check, words, apply, of)
        return apply

    return register


def break_artifact(folder: Path, fault: ArtifactFault, seed: int = 0) -> Path:
    """Put the fault into the artifact in `folder`, and make its manifest name the files as they are now."""
    fault.apply(folder, random.Random(seed))
    manifest = Artifact.read(folder)
    manifest.files = record_files(folder)
    manifest.write(folder)
    return folder


@contextmanager
def tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint of one shard, written back afterwards."""
    path = folder / WEIGHTS
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    held = load_file(path)
    yield held
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, path, metadata)


@contextmanager
def document(folder: Path, name: str) -> Iterator[dict]:
    path = folder / name
    value = json.loads(path.read_text(encoding="utf-8"))
    yield value
    path.write_text(json.dumps(value), encoding="utf-8")


@contextmanager
def scheme(folder: Path) -> Iterator[dict]:
    """What config.json says of the quantized modules, the first group of them."""
    with document(folder, "config.json") as config:
        yield next(iter(config["quantization_config"]["config_groups"].values()))


def store_plain(folder: Path, modules: list[str], ignore: list[str]) -> None:
    """Put dequantized weights in the place of quantized modules, and name `ignore` in the config."""
    checkpoint = open_checkpoint(folder)
    stored = CONVENTION.modules(checkpoint)
    plain = {module: stored[module].read().dequantize(torch.bfloat16) for module in modules}
    with tensors(folder) as held:
        for module in modules:
            for name in stored[module].tensors:
                del held[name]
            held[f"{module}.weight"] = plain[module]
    with document(folder, "config.json") as config:
        config["quantization_config"]["ignore"] += ignore


# Weights that are not the ones that were quantized.


@fault("weights", "not the ones that were quantized")
def a_thousandth_of_the_packed_words_random(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        for name, words in held.items():
            if name.endswith("weight_packed"):
                flat = words.view(-1)
                for index in rng.sample(range(len(flat)), max(1, len(flat) // 1000)):
                    flat[index] = rng.randrange(-(1 << 31), 1 << 31)


@fault("weights", ONE)
def zero_points_of_one_linear_off_by_one(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        held[f"{ONE}.weight_zero_point"] ^= 0x11111111


@fault("weights", "not the ones that were quantized")
def zero_points_of_every_linear_shifted(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        for name, words in held.items():
            if name.endswith("weight_zero_point"):
                words ^= 0x11111111


@fault("weights", "not the ones that were quantized: model.layers.")
def two_layers_swapped(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        for name in [name for name in held if name.startswith("model.layers.1.")]:
            other = name.replace("layers.1.", "layers.2.")
            held[name], held[other] = held[other], held[name]


@fault("refused", f"{ONE}: 1 of 1,536 numbers in {ONE}.weight_scale are NaN or infinite")
def a_scale_that_is_not_a_number(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        held[f"{ONE}.weight_scale"][3, 0] = torch.nan


@fault("weights", f"{EMBEDDINGS} (82 of 8192 rows)")
def rare_embeddings_shuffled(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        rare = held[EMBEDDINGS][-82:]
        rare.copy_(rare.roll(1 + rng.randrange(80), dims=0).clone())


@fault("weights", f"{EMBEDDINGS} (8192 of 8192 rows)")
def the_vocabulary_rotated(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        held[EMBEDDINGS] = held[EMBEDDINGS].roll(1, dims=0)


@fault("weights", "not the ones that were quantized", of=NVFP4)
def a_shared_global_scale_corrupted(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        for name in held:
            if name.startswith(ONE.rpartition(".")[0]) and name.endswith("weight_global_scale"):
                held[name] *= 2


# Something else quantized than is said.


@fault("weights", "no module is quantized, but its manifest lists 28")
def nothing_quantized(folder: Path, rng: random.Random) -> None:
    store_plain(folder, list(Artifact.read(folder).module_errors()), [])
    with document(folder, "config.json") as config:
        del config["quantization_config"]


@fault("weights", f"the manifest says that {ONE} are quantized, but they are not")
def a_layer_left_plain(folder: Path, rng: random.Random) -> None:
    store_plain(folder, [ONE], [ONE])


@fault("weights", "model.layers.0.mlp.gate are routers and are quantized", of=EXPERTS)
def a_router_quantized(folder: Path, rng: random.Random) -> None:
    router = "model.layers.0.mlp.gate"
    with tensors(folder) as held:
        weight = quantize_int4(held.pop(f"{router}.weight"), Int4(16)).weight
        held |= CONVENTION.tensors(router, weight)
    with document(folder, "config.json") as config:
        config["quantization_config"]["ignore"].remove(router)


@fault("refused", "quantization config excludes it ('re:.*down_proj')")
def an_ignore_list_that_names_packed_modules(folder: Path, rng: random.Random) -> None:
    with document(folder, "config.json") as config:
        config["quantization_config"]["ignore"].append("re:.*down_proj")


@fault("refused", f"{ONE} stored unquantized, but the quantization config covers it")
def an_ignore_list_that_forgets_a_plain_module(folder: Path, rng: random.Random) -> None:
    store_plain(folder, [ONE], [])


# What is not weights.


@fault("tokenizer and templates", "token_ids: generation_config.json: eos_token_id is 5, the baseline's 0")
def another_eos(folder: Path, rng: random.Random) -> None:
    with document(folder, "generation_config.json") as config:
        config["eos_token_id"] = 5


@fault("tokenizer and templates", "token_ids: config.json: eos_token_id is null, the baseline's 0")
def no_eos(folder: Path, rng: random.Random) -> None:
    for name in ("config.json", "generation_config.json"):
        with document(folder, name) as config:
            del config["eos_token_id"]


@fault("tokenizer and templates", "generation_config: ")
def another_temperature(folder: Path, rng: random.Random) -> None:
    with document(folder, "generation_config.json") as config:
        config |= {"do_sample": True, "temperature": 0.1}


@fault("tokenizer and templates", "chat_template: ")
def a_broken_chat_template(folder: Path, rng: random.Random) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['contents'] }}", encoding="utf-8")


@fault("tokenizer and templates", "merges: merge ")
def two_merges_swapped(folder: Path, rng: random.Random) -> None:
    with document(folder, "tokenizer.json") as tokenizer:
        merges = tokenizer["model"]["merges"]
        index = 300 + rng.randrange(100)
        merges[index], merges[index + 1] = merges[index + 1], merges[index]


@fault("tokenizer and templates", "vocabulary: token ")
def two_tokens_exchanged(folder: Path, rng: random.Random) -> None:
    with document(folder, "tokenizer.json") as tokenizer:
        vocabulary = tokenizer["model"]["vocab"]
        first, second = list(vocabulary)[400:402]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


@fault("tokenizer and templates", "normalizer: ")
def another_normalizer(folder: Path, rng: random.Random) -> None:
    with document(folder, "tokenizer.json") as tokenizer:
        tokenizer["normalizer"] = {"type": "Lowercase"}


@fault("tokenizer and templates", "vocabulary: vocab.json: only the artifact has it")
def a_vocabulary_beside_the_tokenizer(folder: Path, rng: random.Random) -> None:
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}), encoding="utf-8")


@fault("tokenizer and templates", f"chat_template: {SECOND_TEMPLATE}: only the artifact has it")
def a_second_chat_template(folder: Path, rng: random.Random) -> None:
    (folder / SECOND_TEMPLATE).parent.mkdir()
    (folder / SECOND_TEMPLATE).write_text("{{ messages[0]['content'] }}", encoding="utf-8")


@fault("tokenizer and templates", "config: auto_map")
def code_of_another_model(folder: Path, rng: random.Random) -> None:
    with document(folder, "config.json") as config:
        config["auto_map"] = {"AutoModelForCausalLM": "other.Model"}


@fault("tokenizer and templates", "config: rope_parameters")
def positions_stretched_beyond_512(folder: Path, rng: random.Random) -> None:
    """As with quality on short windows alone: what a text of 512 tokens shows is sound."""
    with document(folder, "config.json") as config:
        config["rope_parameters"] |= {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        }  # fmt: skip


@fault("tokenizer and templates", "config: rope_parameters: rope_theta: 1000000.0, the baseline's 10000.0")
def another_base_of_positions_in_its_old_spelling(folder: Path, rng: random.Random) -> None:
    with document(folder, "config.json") as config:
        del config["rope_parameters"]
        config["rope_theta"] = 1e6


# What other readers refuse, skip or read otherwise.


@fault("other readers", "quantization_config.quantization_status: 'frozen'")
def weights_said_to_be_uncompressed(folder: Path, rng: random.Random) -> None:
    with document(folder, "config.json") as config:
        config["quantization_config"]["quantization_status"] = "frozen"


@fault("other readers", "weights.actorder: 'group', and no tensor ends in .weight_g_idx")
def columns_in_an_order_that_is_not_stored(folder: Path, rng: random.Random) -> None:
    with scheme(folder) as group:
        group["weights"]["actorder"] = "group"


@fault("other readers", "output_activations: ")
def outputs_said_to_be_rounded(folder: Path, rng: random.Random) -> None:
    with scheme(folder) as group:
        group["output_activations"] = group["weights"]


@fault("other readers", "weights.zero_points: compressed-tensors has no such field")
def a_field_of_nobodys(folder: Path, rng: random.Random) -> None:
    with scheme(folder) as group:
        group["weights"]["zero_points"] = True


@fault("other readers", "ignore: 'Linear' is a class")
def a_class_in_the_ignore_list(folder: Path, rng: random.Random) -> None:
    with document(folder, "config.json") as config:
        config["quantization_config"]["ignore"].append("Linear")


@fault("other readers", "extra.safetensors: no index names it")
def weights_that_no_index_names(folder: Path, rng: random.Random) -> None:
    with tensors(folder) as held:
        save_file({EMBEDDINGS: held[EMBEDDINGS].roll(1, dims=0)}, folder / "extra.safetensors")


@fault("other readers", "config.json: rope_theta is 1e+06, rope_parameters's rope_theta is 10000")
def two_bases_of_positions(folder: Path, rng: random.Random) -> None:
    with document(folder, "config.json") as config:
        config["rope_theta"] = 1e6


@fault("other readers", f"{SIDECAR}: quant_algo is 'FP8', in config.json None")
def a_file_beside_the_config_that_says_another_format(folder: Path, rng: random.Random) -> None:
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (folder / SIDECAR).write_text(json.dumps({"quantization": section}), encoding="utf-8")


# Sound weights, laid out for one request.


@fault("throughput", SLOW_LAYOUT)
def the_tinygemm_layout(folder: Path, rng: random.Random) -> None:
    layout(folder, force=SLOW_LAYOUT, ms=(8,), progress=False)
