"""What is measured is what is served: projections are merged before a layout is chosen for them.

The layouts here are told what they cost: the one for narrow layers by the row, the one for wide layers all
the same. So q, k and v by themselves are narrow, and their merged product is wide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scalegate.layouts.choosing import choose as choose_module
from scalegate.layouts.choosing.choose import choose
from scalegate.layouts.choosing.measure import ShapeMeasurements
from scalegate.layouts.choosing.plan import LayoutPlan, Measurement
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.modules.linear import QuantizedLinear, packed_layers
from scalegate.layouts.modules.merged_linear import MergedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import PackedWeight, Problem
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.model_loader.load_model import load_model, problems
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from transformers import AutoModelForCausalLM, Qwen3Config

NARROW, WIDE = "for_narrow_layers", "for_wide_layers"
WIDE_MICROSECONDS, BASELINE_MICROSECONDS = 100.0, 400.0
CPU = torch.device("cpu")
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class RenamedLayout:
    """The plain layout under another name, that remembers the shapes that it multiplied."""

    kernel = "dequantize + linear"

    def __init__(self, name: str):
        self.name = name
        self.multiplied: list[tuple[int, ...]] = []

    def refuses(self, problem: Problem) -> str | None:
        return LAYOUTS["dequantize"].refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return replace(LAYOUTS["dequantize"].pack(weight, dtype), layout=self.name)

    def matmul(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        self.multiplied.append(packed.shape)
        return LAYOUTS["dequantize"].matmul(x, packed)


def microseconds(name: str, problem: Problem) -> float | None:
    """Narrow layers cost 1 µs a row: up to 99 rows they are the better for it."""
    return {NARROW: float(problem.n), WIDE: WIDE_MICROSECONDS}.get(name)


def as_told(
    problem: Problem, ms: Sequence[int], layouts: Sequence[str], **options: object
) -> ShapeMeasurements:
    """Stands for `measure`; layouts without a cost are as slow as the unquantized product."""
    found = ShapeMeasurements()
    for name in layouts:
        refusal = LAYOUTS[name].refuses(problem)
        if refusal is not None:
            found.refusals[name] = refusal
            continue
        us = microseconds(name, problem) or BASELINE_MICROSECONDS
        found.measurements += [
            Measurement(name, LAYOUTS[name].kernel, m, us, BASELINE_MICROSECONDS) for m in ms
        ]
    return found


@pytest.fixture(autouse=True)
def two_layouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, RenamedLayout]:
    """Registered for one test, with the measuring that tells what they cost."""
    added = {name: RenamedLayout(name) for name in (NARROW, WIDE)}
    monkeypatch.setattr(LAYOUTS, "_entries", LAYOUTS._entries | added)
    monkeypatch.setattr(choose_module, "measure", as_told)
    monkeypatch.setenv("SCALEGATE_CACHE", str(tmp_path / "cache"))
    return added


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "source")
    quantize(
        tmp_path / "source",
        Recipe(name="g32", spec=Int4(32)),
        tmp_path / "artifact",
        device="cpu",
        progress=False,
    )
    return tmp_path / "artifact"


def apart(folder: Path) -> dict[str, Problem]:
    """Every weight as it is stored, by itself."""
    checkpoint = open_checkpoint(folder)
    modules = convention_of(checkpoint).modules(checkpoint)
    return {name: stored.problem(torch.float32, CPU) for name, stored in modules.items()}


def picks(plan: LayoutPlan, layers: Mapping[str, Problem]) -> dict[str, str | None]:
    return {name: plan.layout_for(problem) for name, problem in layers.items()}


def test_layouts_are_chosen_for_merged_products_and_those_are_served(
    artifact: Path, two_layouts: dict[str, RenamedLayout]
):
    merged = problems(open_checkpoint(artifact))
    first_layer = {name: problem.n for name, problem in merged.items() if ".layers.0." in name}
    assert first_layer == {
        f"{ATTENTION}.q_proj+k_proj+v_proj": 3 * 64,
        f"{ATTENTION}.o_proj": 64,
        f"{MLP}.gate_proj+up_proj": 2 * 64,
        f"{MLP}.down_proj": 64,
    }
    wide = {name for name in merged if "+" in name}

    laid_out = layout(artifact, ms=(1, 8), device="cpu", progress=False)
    chosen = picks(laid_out.plan, merged)
    assert chosen == {name: WIDE if name in wide else NARROW for name in merged}
    assert {name for choice in laid_out.plan.choices for name in choice.modules} == set(merged)

    loaded = load_model(artifact, progress=False)
    assert loaded.layouts == chosen, "the recorded plan is what is served"
    assert packed_layers(loaded.model) == {
        f"{WIDE} 192x64": 2,
        f"{WIDE} 128x64": 2,
        f"{NARROW} 64x64": 4,
    }
    with torch.inference_mode():
        loaded.model(torch.arange(3, 9)[None])
    assert set(two_layouts[WIDE].multiplied) == {(192, 64), (128, 64)}
    assert set(two_layouts[NARROW].multiplied) == {(64, 64)}


def test_measured_apart_another_layout_would_have_been_picked(artifact: Path):
    """Negative control: else the test above shows nothing."""
    stored = apart(artifact)
    assert f"{ATTENTION}.q_proj" in stored and not any("+" in name for name in stored)
    plan = choose(stored, (1, 8), progress=False)
    assert set(picks(plan, stored).values()) == {NARROW}


def test_a_plan_of_weights_apart_says_nothing_of_what_is_served(artifact: Path):
    """As one that was recorded before projections were merged."""
    old = choose(apart(artifact), (1, 8), progress=False)
    merged = problems(open_checkpoint(artifact))
    wide = {name: problem for name, problem in merged.items() if "+" in name}
    assert all(old.layout_for(problem) is None for problem in wide.values())
    layouts = load_model(artifact, plan=old, progress=False).layouts
    assert {layouts[name] for name in wide} == {"dequantize"}, "the first that serves them exactly"
    assert not old.covers(merged, layouts)

    manifest = Artifact.read(artifact)
    replace(manifest, layout_plan=old.to_json()).write(artifact)
    again = layout(artifact, ms=(1, 8), device="cpu", progress=False)
    assert picks(again.plan, wide) == dict.fromkeys(wide, WIDE), "so it is measured again"


def test_merged_layers_are_one_product_that_their_names_share(artifact: Path):
    layout(artifact, ms=(1,), device="cpu", progress=False)
    model = load_model(artifact, progress=False).model
    parts = [model.get_submodule(f"{ATTENTION}.{name}_proj") for name in "qkv"]
    assert all(isinstance(part, MergedLinear) for part in parts)
    assert len({id(part.merged) for part in parts}) == 1
    assert isinstance(parts[0].merged, QuantizedLinear)
