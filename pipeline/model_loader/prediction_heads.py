"""Multi-token prediction (MTP) heads: layers beside the decoder that predict further tokens, for speculation.

transformers loads none of them, so they are copied unchanged. This file recognizes prediction heads by the
names of their tensors, and knows how a config counts them.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

HEAD = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?(\.|$)")
LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""The config fields that hold the number of prediction heads."""


def is_prediction_head(name: str, config: Mapping[str, Any]) -> bool:
    """Say whether a tensor belongs to a prediction head: by its name, or because its layer comes after the
    last layer.

    config: the language model's config
    """
    if HEAD.search(name):
        return True
    layers = config.get("num_hidden_layers")
    heads = max((config[count] for count in COUNTS if isinstance(config.get(count), int)), default=0)
    layer = LAYER.search(name)
    return layer is not None and isinstance(layers, int) and layers <= int(layer[1]) < layers + heads


def without_heads(
    config: Mapping[str, Any], left_out: Collection[str], kept: Collection[str]
) -> dict[str, Any]:
    """Return `config` with zero prediction heads if all of their tensors are left out."""
    text = config.get("text_config") or config
    some_left_out = any(is_prediction_head(name, text) for name in left_out)
    if not some_left_out or any(is_prediction_head(name, text) for name in kept):
        return dict(config)
    corrected = _uncounted(config)
    if isinstance(config.get("text_config"), dict):
        corrected["text_config"] = _uncounted(config["text_config"])
    return corrected


def _uncounted(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: 0 if key in COUNTS else value for key, value in section.items()}
