"""The table of measured and chosen formats in a manifest, prepared for cards, pages and totals.

`quantization/mixed_recipe.py` makes it.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import WeightFormat, spec_from_json

SENSITIVITY = "sensitivity"
"""The table's key in the manifest."""
GROUPS, CHOSEN, TEXT = "groups", "chosen", "text"
KEPT_BY_BUDGET = "kept at 16 bits by the budget"
"""The reason for modules that the recipe quantizes but the budget keeps unquantized."""
COLUMNS = ("layers", "format", "groups", "bits", "measured KL")


def plain_weights(quantization: Mapping[str, Any]) -> int:
    """Return the number of weights that a budget has kept at 16 bits; 0 without a budget."""
    groups = quantization.get(SENSITIVITY, {}).get(GROUPS, [])
    return sum(_weights(group) for group in groups if isinstance(_chosen(group), Unquantized))


def shown(quantization: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table's part for a card and a page; None if the formats were not chosen under a budget."""
    table = quantization.get(SENSITIVITY)
    if table is None:
        return None
    return {
        "text": measured_on(table),
        "bits": f"{table['bits_per_weight']:g}",
        "kl": f"{table['kl']:g}",
        "columns": COLUMNS,
        "rows": rows_by_kind(table),
    }


def measured_on(table: Mapping[str, Any]) -> str:
    """Return a description of the text that was read; empty for tables of older versions, which do not record
    it.
    """
    text = table.get(TEXT)
    if text is None:
        return "a text that was not recorded"
    return "text that the model wrote itself" if "drawn" in text else str(text["source"])


def rows_by_kind(table: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each kind of layer and each of its formats, with the columns in `COLUMNS`."""
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for group in table[GROUPS]:
        leaves = dict.fromkeys(module.rpartition(".")[2] for module in group["modules"])
        kinds[", ".join(leaves), _chosen(group).key].append(group)
    return [
        (kind, key, str(len(groups)), f"{_bits(groups):.3f}", f"{sum(map(_divergence, groups)):.5f}")
        for (kind, key), groups in sorted(kinds.items())
    ]


def table_lines(table: Mapping[str, Any]) -> list[str]:
    """Return lines to print, one for each group of modules, with its cost in each format and the chosen
    format.
    """
    lines = []
    for group in table[GROUPS]:
        costs = "  ".join(f"{spec.key} {kl:.5f}" for spec, kl in _measured(group).items())
        modules = group["modules"]
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        lines.append(f"{modules[0]}{more}: KL {costs}; became {_chosen(group).key}")
    return lines


def _chosen(group: Mapping[str, Any]) -> WeightFormat:
    return spec_from_json(group[CHOSEN])


def _measured(group: Mapping[str, Any]) -> dict[WeightFormat, float]:
    return {spec_from_json(measured["spec"]): float(measured["kl"]) for measured in group["formats"]}


def _divergence(group: Mapping[str, Any]) -> float:
    return _measured(group).get(_chosen(group), 0.0)


def _weights(group: Mapping[str, Any]) -> int:
    return sum(n * k for n, k in group["shapes"])


def _bits(groups: list[Mapping[str, Any]]) -> float:
    """Return the average bits per weight."""
    bits = sum(_chosen(group).bits_per_weight(n, k) * n * k for group in groups for n, k in group["shapes"])
    return bits / sum(map(_weights, groups))
