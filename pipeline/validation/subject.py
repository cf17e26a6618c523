"""Describes the subject of a verdict: the checkpoint, its exact bytes and how its layers ran."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ...serving_check.evidence.verdict import Subject
from ..checkpoints.baseline import weights_digest
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.decoded_tensors import DecodedTensor
from ..conventions.all_conventions import convention_of
from ..conventions.declared import stored_weights
from ..records.artifact import Artifact, record_files


def describe_subject(
    checkpoint: Checkpoint, manifest: Artifact | None, layouts: Mapping[str, str]
) -> Subject:
    """Return the subject of a verdict. Digests come from the files, or from a manifest that was just
    checked.
    """
    files = manifest.files if manifest else record_files(checkpoint.folder)
    described = manifest or Artifact(checkpoint.public_name, checkpoint.revision, {}, {}, files)
    return Subject(
        name=checkpoint.public_name,
        revision=checkpoint.revision,
        bytes_digest=described.bytes_digest(),
        layout_plan_sha256=described.layout_plan_sha256(),
        quantization=describe_quantization(checkpoint),
        layouts=dict(Counter(layouts.values())),
        weights_sha256=weights_digest(checkpoint, files),
        made_from_sha256=manifest.source_sha256 if manifest else None,
        manifest_sha256=manifest.sha256() if manifest else None,
        other_inputs=checkpoint.other_inputs,
    )


def describe_baseline(checkpoint: Checkpoint, layouts: Mapping[str, str]) -> Subject:
    """Describe a source: FP8, MXFP4, GPTQ and the like count as the 16-bit weights that they are read as."""
    described, forms = describe_subject(checkpoint, None, layouts), smaller_forms(checkpoint)
    return replace(described, quantization="none", stored_as=", ".join(forms)) if forms else described


def smaller_forms(checkpoint: Checkpoint) -> list[str]:
    """Return the formats below 16 bits that its weights are dequantized from; empty if any weight is served
    packed.
    """
    stored = stored_weights(checkpoint).values()
    if any(weight.is_quantized for weight in stored):
        return []
    fused = [info.stored_as for info in checkpoint.tensors.values() if isinstance(info, DecodedTensor)]
    return sorted({*fused, *(weight.stored_as for weight in stored if weight.stored_as is not None)})


def describe_quantization(checkpoint: Checkpoint) -> str:
    """Return `compressed-tensors, INT4 g128, zero points`; `none` for a plain checkpoint."""
    convention = convention_of(checkpoint)
    formats = {weight.spec.label for weight in stored_weights(checkpoint).values() if weight.is_quantized}
    if checkpoint.quantization_config is None:
        return "none"
    return ", ".join([convention.name, *sorted(formats), *smaller_forms(checkpoint)])
