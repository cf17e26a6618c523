"""torchao: tensor subclasses flattened into safetensors, their attributes as JSON in the file's header.

Each subclass has a file: `torchao_int4.py` and `torchao_nvfp4.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...base.errors import UserError
from ...base.untrusted_files import parse_json
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from . import torchao_int4, torchao_nvfp4  # noqa: F401 - registers them
from .convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight
from .stored import not_converted
from .targets import as_patterns
from .torchao_form import FORMS, READERS

METHOD = "torchao"
NAMES_KEY = "tensor_names"
EXPERTS = ".experts."
INSTEAD = "export compressed-tensors"


class TorchAO(ExportDefaults):
    name = METHOD

    @property
    def reads(self) -> str:
        return f"torchao {', '.join(READERS)}"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") == METHOD

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        stored = {}
        for name, described in _subclasses(checkpoint).items():
            module, _, leaf = name.rpartition(".")
            kind = str(described.get("_type"))
            if kind not in READERS or leaf != "weight":
                raise UserError(
                    f"{checkpoint.source}: {name} is a torchao {kind}; Scalegate reads {self.reads}"
                )
            stored[module] = READERS[kind](checkpoint, module, described.get("_data") or {})
        if not stored:
            raise UserError(
                f"{checkpoint.source}: config.json declares torchao, but no safetensors header describes a "
                "quantized tensor; save the checkpoint again with torchao's safetensors support"
            )
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        # The header describes each tensor by name, so there is no rule that could disagree with the files.
        return False

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        return not_converted(checkpoint, module)

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if spec.name not in FORMS:
            return f"torchao's forms are written in {' and '.join(FORMS)}, not in {spec.name}; {INSTEAD}"
        refusal = FORMS[spec.name].refuses(spec)
        if refusal is not None:
            return f"{refusal}; {INSTEAD}"
        if EXPERTS in module:
            return f"torchao's forms hold no single experts; {INSTEAD}"
        return f"torchao's forms hold no embeddings; {INSTEAD}" if is_embedding else None

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        refusal = self.refuses(weight.spec, module)
        if refusal is not None:
            raise ValueError(f"{module}: {refusal}")
        return FORMS[weight.spec.name].tensors(module, weight)

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        modules: dict[str, list[str]] = {}
        configs: dict[str, dict[str, Any]] = {}
        for module, spec in specs.items():
            # Specs that differ in what the config does not say belong together.
            config = FORMS[spec.name].config(spec)
            configs.setdefault(json.dumps(config), config)
            modules.setdefault(json.dumps(config), []).append(module)
        if len(configs) == 1:
            (quant_type,) = configs.values()
        else:
            patterns = as_patterns(modules, ignore)
            by_name = {pattern: config for key, config in configs.items() for pattern in patterns[key]}
            data = {"fqn_to_config": by_name, "module_fqn_to_config": by_name}
            quant_type = {"_type": "FqnToConfig", "_version": 1, "_data": data}
        return {
            "quant_method": METHOD,
            "quant_type": {"default": quant_type},
            "modules_to_not_convert": list(ignore),
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def file_metadata(
        self,
        specs: Mapping[str, WeightFormat],
        shapes: Mapping[str, tuple[int, int]],
        plain: Sequence[str],
    ) -> dict[str, str]:
        # Readers merge the headers of all files and keep the last list of names: every file has to hold all.
        described: dict[str, Any] = {name: {"_type": "Tensor"} for name in plain}
        for module, spec in specs.items():
            form = FORMS[spec.name]
            described[f"{module}.weight"] = {"_type": form.kind, **form.described(spec, shapes[module])}
        metadata = {name: json.dumps(value) for name, value in described.items()}
        return {"format": "pt", **metadata, NAMES_KEY: json.dumps(list(described))}

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float:
        return FORMS[spec.name].bits_per_weight(spec, n, k)


def _subclasses(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the headers' entries, over all files, for each tensor that is not plain."""
    described: dict[str, dict[str, Any]] = {}
    for file in checkpoint.shards:
        for name, text in checkpoint.metadata(file).items():
            if name in ("format", NAMES_KEY) or "." not in name:
                continue
            try:
                value = parse_json(text, f"the header's entry for {name}")
            except UserError as error:
                raise UserError(f"{file}: {error.message}; save the checkpoint again") from error
            if isinstance(value, dict) and value.get("_type") != "Tensor":
                if not isinstance(value.get("_data") or {}, dict):
                    raise UserError(
                        f"{file}: the header's entry for {name} is malformed; save the checkpoint again"
                    )
                described[name] = value
    return described


CONVENTION = TorchAO()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
