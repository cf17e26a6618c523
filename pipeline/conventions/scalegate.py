"""Scalegate's own convention, for formats that no published convention stores in safetensors: IQ2_XXS.

`quantization_config` is `{"quant_method": "scalegate", "format": "iq2-xxs", "modules": [...], "ignore":
[...]}`, and a module's tensors are those of its format: `<module>.weight_words` int32 [N, K/16],
`<module>.weight_scale` fp16 [N, K/256]. Layers whose K 256 does not divide are in the section's
`"others": {"int4-g32": [...]}`: `<module>.weight_codes`, `.weight_scale` and `.weight_zero_point` of
`layouts/formats/int4.py`. Other engines do not read this convention; `pipeline gguf` writes what llama.cpp
reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.int4 import Int4
from ...layouts.formats.iq2_xxs import BLOCK, IQ2XXS
from ...layouts.formats.weight_format import Weight, WeightFormat, weight_of
from ..checkpoints.checkpoint import Checkpoint
from .convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight
from .stored import refuse_shape, require_tensor

METHOD = "scalegate"
SPECS: dict[str, WeightFormat] = {IQ2XXS.name: IQ2XXS()}
OTHERS: dict[str, WeightFormat] = {f"int4-g{BLOCK}": Int4(BLOCK, symmetric=True)}
"""What stands in for a format in layers that cannot have it, by the name in the section's `others`."""
PREFIX = ".weight_"
META = torch.device("meta")


class Scalegate(ExportDefaults):
    name = METHOD
    reads = f"Scalegate's own ({', '.join(spec.label for spec in SPECS.values())})"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") == METHOD

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        config = checkpoint.quantization_config or {}
        name, others = config.get("format"), config.get("others", {})
        if name not in SPECS:
            raise UserError(
                f"{checkpoint.source}: config.json declares {METHOD} with format {name!r}; "
                f"the format has to be one of {', '.join(SPECS)}"
            )
        if not isinstance(others, dict) or not others.keys() <= OTHERS.keys():
            raise UserError(
                f"{checkpoint.source}: config.json declares {METHOD} with `others` {others!r}; it has to "
                f"list modules by format: {', '.join(OTHERS)}"
            )
        found: dict[str, StoredWeight] = {}
        for format_name, modules in ({name: config.get("modules")} | others).items():
            if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
                raise UserError(
                    f"{checkpoint.source}: config.json declares {METHOD} and no list of `modules`"
                )
            spec = (SPECS | OTHERS)[format_name]
            found |= {module: _stored(checkpoint, module, spec) for module in modules}
        return found

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        config = checkpoint.quantization_config or {}
        return any(
            module in modules for modules in (config.get("modules", []), *config.get("others", {}).values())
        )

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        return module if module in (checkpoint.quantization_config or {}).get("ignore", []) else None

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if spec in (*SPECS.values(), *OTHERS.values()):
            return None
        return f"{METHOD} is written in {', '.join(SPECS)} only, not in {spec.name}; leave --export out"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        return {f"{module}{PREFIX}{name}": tensor.contiguous() for name, tensor in weight.tensors().items()}

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        [(name, own)] = SPECS.items()
        modules = [module for module, spec in specs.items() if spec == own]
        section = {"quant_method": METHOD, "format": name, "modules": modules, "ignore": list(ignore)}
        others = {
            other: [module for module, spec in specs.items() if spec == it] for other, it in OTHERS.items()
        }
        return section | ({"others": others} if any(others.values()) else {})


def _stored(checkpoint: Checkpoint, module: str, spec: WeightFormat) -> StoredWeight:
    """Return the weight of `module`; raise UserError if its tensors are not valid in the format."""
    small = spec.random(1, spec.column_multiple, META).tensors()
    names = {part: f"{module}{PREFIX}{part}" for part in small}
    found = {part: require_tensor(checkpoint, names[part], (tensor.dtype,)) for part, tensor in small.items()}
    part, info = next(iter(found.items()))
    if len(info.shape) != 2 or info.shape[1] % small[part].shape[1]:
        raise UserError(
            f"{checkpoint.source}: tensor {info.name} has shape {list(info.shape)}, which no {spec.label} has"
        )
    n, k = info.shape[0], info.shape[1] // small[part].shape[1] * spec.column_multiple
    refuse_shape(checkpoint, info.name, spec, n, k)
    for part, row in spec.random(1, k, META).tensors().items():
        require_tensor(checkpoint, names[part], (row.dtype,), (n, row.shape[1]))

    def read() -> Weight:
        return weight_of(spec, {part: checkpoint.read(name) for part, name in names.items()})

    return StoredWeight(module, (n, k), spec, tuple(names.values()), read)


CONVENTION = Scalegate()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
