"""What one call of `release` asks for: sorted into the stages' options, and refused before any work."""

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.release_request import read_request
from scalegate.pipeline.records.recipe_file import load_recipe

RECIPE = load_recipe("int4-hqq")


def test_options_reach_the_stage_that_they_are_for():
    given = {"export": "torchao", "floor": 0.95, "m": (1, 32), "max_blocks": 12, "to_revision": "next"}
    request = read_request({**given, "device": "cpu", "layout": "dequantize", "tasks": "arc_easy"}, RECIPE)
    assert request.making.export == "torchao" and request.publication.to_revision == "next"
    assert request.workload.ms == (1, 32) and request.workload.max_blocks == 12
    assert request.bounds({}).throughput_floor == 0.95
    assert request.validation.tasks == "arc_easy"
    assert request.engine.layout == "dequantize" and request.device == "cpu"
    assert "layout" not in request.given, "the artifact's plan records it; its servers are not told"


def test_a_rivals_revision_is_of_a_rival_on_the_hub():
    request = read_request({"rival": "ORG/other", "rival_revision": "v2"}, RECIPE)
    assert request.validation.rival_revision == "v2"
    for rival, said in (("int4-hqq-g32", "int4-hqq-g32 is a recipe"), (None, "no rival is named")):
        with pytest.raises(UserError, match=f"--rival-revision v2 .*{said}"):
            read_request({"rival": rival, "rival_revision": "v2"}, RECIPE)
