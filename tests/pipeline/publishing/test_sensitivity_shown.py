"""What a budget chose, with what each group of layers was measured to cost: on the card and the page."""

import re
from pathlib import Path
from typing import Any

from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.formats.weight_format import spec_to_json
from scalegate.pipeline.publishing.card import write_card
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.sensitivity_table import plain_weights
from scalegate.pipeline.validation.write_down import Place, write_down
from scalegate.tests.pipeline.publishing.passed_artifact import passing_verdict

TABLE: dict[str, Any] = {
    "key": "0",
    "text": {"source": "code.jsonl", "sha256": "1", "shape": [4, 512]},
    "bits_per_weight": 8.1042,
    "kl": 0.008,
    "groups": [
        {
            "modules": [f"model.layers.{layer}.mlp.gate_proj", f"model.layers.{layer}.mlp.up_proj"],
            "shapes": [[256, 128], [256, 128]],
            "formats": [{"spec": spec_to_json(Int4()), "kl": 0.004}],
            "chosen": spec_to_json(chosen),
        }
        for layer, chosen in enumerate([Int4(), Int4(), Unquantized()])
    ],
}
ROWS = [
    ["gate_proj, up_proj", "int4 g128 zp", "2", "4.156", "0.00800"],
    ["gate_proj, up_proj", "unquantized", "1", "16.000", "0.00000"],
]


def budgeted(folder: Path, **changes: Any) -> Artifact:
    artifact = Artifact.read(folder)
    artifact.quantization |= {"sensitivity": {**TABLE, **changes}, "bits_per_weight": 8.1042}
    artifact.write(folder)
    return artifact


def card_of(folder: Path, artifact: Artifact) -> str:
    return write_card(folder, artifact, passing_verdict(artifact), "org/it", "org/it")


def test_the_card_has_a_row_for_each_kind_of_layer_and_format(artifact: Path) -> None:
    assert "within a budget" not in card_of(artifact, Artifact.read(artifact))
    text = card_of(artifact, budgeted(artifact))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [line for line in lines if line in ROWS] == ROWS
    assert "measured on code.jsonl" in text and "8.1042 bits a weight in all" in text
    assert "weights that a budget kept at 16 bits count too" in text
    drawn = card_of(artifact, budgeted(artifact, text={"source": "self", "drawn": [512, 512]}))
    assert "measured on text that the model wrote itself" in drawn


def test_the_page_has_the_same_rows(artifact: Path, tmp_path: Path) -> None:
    manifest = budgeted(artifact)
    place = Place("the artifact", artifact, tmp_path / "report", manifest)
    write_down(passing_verdict(manifest), [place], None)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>.*?</tr>", page, re.S)]
    assert [row for row in rows if row in ROWS] == ROWS
    assert "measured on code.jsonl" in page


def test_what_is_kept_plain_is_counted() -> None:
    assert plain_weights({"sensitivity": TABLE}) == 2 * 256 * 128
    assert plain_weights({}) == 0
