"""Recipes: what the file says is what is done, and every mistake is found on its line."""

from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.mxfp8 import MXFP8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.quantization.shards.tasks import make_tasks
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.pipeline.records.recipe_file import load_recipe, shipped_recipes
from scalegate.tests.pipeline.quantization.tiny_families import make_text
from transformers import GPT2Config, GPT2LMHeadModel

LAYER = "model.layers.0"
KV_RECIPES = {
    "fp8-kv": "fp8",
    "int4-kv": "int4_per_token_head",
    "nvfp4-kv": "nvfp4",
    "kvarn-k4v2": "kvarn_k4v2_g128",
    "kvarn-k4v4": "kvarn_k4v4_g128",
}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def message(call, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return caught.value.message


def test_the_shipped_recipes_are_what_their_names_say() -> None:
    specs = {name: load_recipe(name).spec for name in shipped_recipes()}
    int4 = {"int4-hqq": Int4(128), "int4-hqq-g64": Int4(64), "int4-hqq-g32": Int4(32)}
    int4 |= {f"int4-{method}": Int4(128) for method in ("gptq", "awq", "awq-gptq", "best")}
    int4["int4-symmetric"] = Int4(128, symmetric=True)
    w4a8 = dict.fromkeys(
        ("int4-fp8", "int4-fp8-gptq", "int4-fp8-best"), Int4(128, symmetric=True, activations="fp8")
    )
    assert specs == int4 | {
        "fp8": FP8(),
        "fp8-block": FP8("block"),
        "fp8-static": FP8("tensor", "static"),
        **w4a8,
        "int8": Int8(128),
        "int8-w8a8": Int8(-1, "int8"),
        "nvfp4": NVFP4(),
        "mxfp4": MXFP4(),
        "mxfp4-gptq": MXFP4(),
        "mxfp4-best": MXFP4(),
        "mxfp4-experts": MXFP4(),
        "mxfp8": MXFP8(),
        "nvfp4-fp8": NVFP4(),
        "nvfp4-gptq": NVFP4(),
        "nvfp4-best": NVFP4(),
        "nvfp4-w4a4": NVFP4(activations=True),
        "iq2-xxs": IQ2XXS(),
    } | dict.fromkeys(KV_RECIPES, Unquantized())
    kv_formats = {name: load_recipe(name).kv_cache for name in shipped_recipes()}
    assert (
        kv_formats
        == dict.fromkeys((*int4, *w4a8), "unquantized")
        | {
            "fp8": "unquantized",
            "fp8-block": "unquantized",
            "fp8-static": "unquantized",
            "int8": "unquantized",
            "int8-w8a8": "unquantized",
            "nvfp4": "unquantized",
            "mxfp4": "unquantized",
            "mxfp4-gptq": "unquantized",
            "mxfp4-best": "unquantized",
            "mxfp4-experts": "unquantized",
            "mxfp8": "unquantized",
            "nvfp4-fp8": "unquantized",
            "nvfp4-gptq": "unquantized",
            "nvfp4-best": "unquantized",
            "nvfp4-w4a4": "unquantized",
            "iq2-xxs": "unquantized",
        }
        | KV_RECIPES
    )


def test_an_unknown_name_lists_the_recipes() -> None:
    assert "int4-hqq-g64" in message(load_recipe, "int4-hhq")


def test_a_file_says_it_all(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(
            tmp_path,
            "format: int4\ngroup_size: 64\nsymmetric: true\nignore: ['*.o_proj']\nlm_head: quantize\n"
            "throughput_floor: 0.5\nrules:\n  - modules: '*.down_proj'\n    group_size: 32\n"
            "  - modules: 're:.*k_proj'\n    ignore: true\n",
        )
    )
    assert recipe.name == "mine"
    assert recipe.spec == Int4(64, symmetric=True)
    assert recipe.rules == (
        Rule("*.down_proj", Int4(32, symmetric=True)),
        Rule("re:.*k_proj", Unquantized()),
    )
    assert recipe.bounds == {"throughput_floor": 0.5}
    assert recipe.to_json()["throughput_floor"] == 0.5


def test_a_rule_may_name_a_format_of_its_own(tmp_path: Path) -> None:
    text = (
        "format: unquantized\nrules:\n  - modules: a\n    format: int4\n    group_size: 32\n"
        "  - modules: b\n    format: nvfp4\n  - modules: c\n    format: unquantized\n"
    )
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.spec == Unquantized()
    assert [rule.spec for rule in recipe.rules] == [Int4(32), NVFP4(), Unquantized()]
    named = load_recipe(write(tmp_path, "symmetric: true\nrules:\n  - modules: a\n    format: int4\n"))
    assert named.rules[0].spec == Int4(), "a format that is named begins from its own defaults"


def test_what_an_artifact_records_of_a_recipe_is_a_recipe(tmp_path: Path) -> None:
    import yaml

    rules = (Rule("a", Int4(32)), Rule("b", Unquantized()), Rule("c", NVFP4()))
    recipe = Recipe("r", spec=Int4(64), ignore=("*.o_proj",), rules=rules, bounds={"throughput_floor": 0.5})
    assert load_recipe(write(tmp_path, yaml.safe_dump(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format: int4\ngroup_size: [64\n", "line 3"),
        ("format: int4\ngroup_sise: 64\n", "line 2: unknown key 'group_sise'; did you mean 'group_size'?"),
        ("group_size: 64\ngroup_size: 32\n", "line 2: key 'group_size' is there twice"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("", "a recipe is a mapping"),
        ("format: int5\n", "line 1: `format` is one of fp8, int4"),
        (
            "\nformat: [int4]\n",
            "line 2: `format` is one of fp8, int4, int8, iq2-xxs, mxfp4, mxfp8, nvfp4, unquantized; "
            "not ['int4']",
        ),
        ("format: nvfp4\ngroup_size: 64\n", "line 2: unknown key 'group_size'; "),
        ("group_size: 100\n", "multiple of 16"),
        ("format: int4\ngroup_size:\n", "line 2: `group_size` is a whole number"),
        ("group_size: big\n", "whole number"),
        ("group_size: true\n", "whole number"),
        ("symmetric: perhaps\n", "true or false"),
        ("zero_point: fractional\nsymmetric: true\n", "exclude each other"),
        ("lm_head: drop\n", "keep, quantize"),
        ("ignore: 3\n", "list of module patterns"),
        ("ignore: ['re:(']\n", "not a valid expression"),
        ("throughput_floor: fast\n", "number above 0"),
        ("method: gptq\nthroughput_floor:\n", "line 2: the bound throughput_floor must be a number above 0"),
        (
            "files: ['../x']\n",
            "line 1: `files` is a list of patterns of files inside the source, such as `*.py`",
        ),
        ("learned_rounding: '3'\n", "line 1: `learned_rounding` is a number of steps up to 100000; not '3'"),
        ("changes: [x]\n", "line 1: `changes` is a list of what differs on purpose, from: vocabulary, "),
        ("kv_cache: fp9\n", "line 1: `kv_cache` is one of unquantized, fp8, "),
        ("name: 3\n", "line 1: `name` is text of at most 1000 characters; not 3"),
        ("3: 4\n", "line 1: unknown key '3'; Valid keys: name, "),
        ("rules:\n  - modules: a\n    group_sz: 3\n", "line 3: unknown key 'group_sz' in a rule"),
        ("rules:\n  - modules: a\n", "line 2: the rule for 'a' needs either"),
        ("rules:\n  - group_size: 32\n", "line 2: a rule needs `modules`"),
        ("rules:\n  - modules: [a, b]\n    ignore: true\n", "line 2: `modules` is a module pattern, such as"),
        ("rules: 3\n", "list of rules"),
        ("rules:\n  - a\n", "line 2: a rule is a mapping"),
        ("rules:\n  - modules: a\n    format: int5\n", "line 3: `format` is one of fp8, int4"),
        ("rules:\n  - modules: a\n    group_size: 100\n", "line 3: `group_size` is a multiple of 16"),
        (
            "rules:\n  - modules: a\n    format: nvfp4\n    symmetric: true\n",
            "line 4: unknown key 'symmetric'",
        ),
        (
            "rules:\n  - modules: a\n    ignore: true\n    symmetric: true\n",
            "line 2: the rule for 'a' needs either",
        ),
        (
            "symmetric: true\nrules:\n  - modules: a\n    zero_point: fractional\n",
            "line 4: `zero_point: fractional` and `symmetric: true` exclude each other",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    found = message(load_recipe, path)
    assert said in found
    assert str(path) in found


def test_a_calibration_text_lies_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rec").mkdir()
    monkeypatch.chdir(tmp_path)
    found = {}
    for said in ("texts/a.jsonl", str(tmp_path / "b.txt"), "self", "hub:org/some:test"):
        (tmp_path / "rec" / "mine.yaml").write_text(f"method: gptq\ncalibration: {said}\n")
        found[said] = load_recipe(Path("rec") / "mine.yaml")
    text, elsewhere, own, hub = found.values()
    assert text.calibration == str(Path("rec", "texts", "a.jsonl"))
    assert text.to_json()["calibration"] == "a.jsonl", "no folder of this machine is published"
    assert elsewhere.calibration == str(tmp_path / "b.txt")
    assert (own.calibration, hub.calibration) == ("self", "hub:org/some:test")
    assert hub.to_json()["calibration"] == "hub:org/some:test"


def tasks_for(checkpoint: Path, **fields: object):
    return make_tasks(open_checkpoint(checkpoint), Recipe("test", **fields))  # type: ignore[arg-type]


def test_rules_apply_in_order_and_ignoring_wins(example_checkpoint: Path) -> None:
    specs = tasks_for(
        example_checkpoint,
        ignore=("*.o_proj",),
        rules=(
            Rule("*.layers.1.*.down_proj", Int4(32)),
            Rule("*.down_proj", Int4(64)),
            Rule("*.q_proj", Unquantized()),
        ),
    ).specs
    assert specs["model.layers.1.mlp.down_proj"] == Int4(32)
    assert specs[f"{LAYER}.mlp.down_proj"] == Int4(64)
    assert specs[f"{LAYER}.mlp.up_proj"] == Int4(128)
    assert f"{LAYER}.self_attn.o_proj" not in specs
    assert f"{LAYER}.self_attn.q_proj" not in specs


def test_a_recipe_may_quantize_only_what_its_rules_name(example_checkpoint: Path) -> None:
    rules = (Rule("*.down_proj", Int4(64)),)
    decided = tasks_for(example_checkpoint, spec=Unquantized(), rules=rules)
    assert set(decided.specs.values()) == {Int4(64)}
    assert all(module.endswith("down_proj") for module in decided.specs)
    assert f"{LAYER}.self_attn.q_proj" in decided.kept["not included by the recipe"]


def test_include_leaves_out_the_rest_and_says_so(example_checkpoint: Path) -> None:
    decided = tasks_for(example_checkpoint, include=("*.mlp.*",))
    assert all(".mlp." in module for module in decided.specs)
    assert f"{LAYER}.self_attn.q_proj" in decided.kept["not included by the recipe"]
    assert f"{LAYER}.self_attn.q_proj" in decided.ignore


@pytest.mark.parametrize("field", ["include", "ignore"])
def test_a_pattern_that_matches_nothing_is_refused(example_checkpoint: Path, field: str) -> None:
    found = message(lambda: tasks_for(example_checkpoint, **{field: ("*.w1",)}))
    assert f"`{field}` pattern '*.w1' matches no linear module" in found
    assert "model.layers.*.mlp.down_proj" in found


def test_a_rule_that_matches_nothing_is_refused(example_checkpoint: Path) -> None:
    assert "'*.w1' matches no" in message(
        lambda: tasks_for(example_checkpoint, rules=(Rule("*.w1", Int4(32)),))
    )


def test_a_group_size_that_does_not_divide_k_names_the_module(example_checkpoint: Path) -> None:
    rules = (Rule("*.layers.2.mlp.down_proj", Int4(80)),)
    found = message(lambda: tasks_for(example_checkpoint, rules=rules))
    assert "model.layers.2.mlp.down_proj cannot be INT4 g80" in found
    assert "K = 768 is no multiple of group size 80" in found
    assert "a rule `modules: 'model.layers.*.mlp.down_proj'` with `group_size: 128`" in found
    found = message(lambda: tasks_for(example_checkpoint, spec=Unquantized(), rules=rules))
    assert "with `format: int4` and `group_size: 128`" in found


def test_a_recipe_that_leaves_nothing_is_refused(example_checkpoint: Path) -> None:
    found = message(lambda: tasks_for(example_checkpoint, ignore=("*",)))
    assert "nothing to quantize" in found and "29 × ignored by the recipe" in found


def test_where_a_format_fits_no_layer_the_reasons_and_formats_that_fit_are_named(tmp_path: Path) -> None:
    source = make_text(tmp_path, "llama", hidden_size=104, head_dim=26, intermediate_size=204)
    found = message(lambda: tasks_for(source, spec=IQ2XXS(), fit="nearest"))
    assert all(f"{reason} is no multiple of 256" in found for reason in ("12 × K = 104", "2 × K = 204"))
    assert found.endswith("choose another recipe, in a format that fits: fp8, int8")


def test_a_tied_head_is_kept_unless_asked_for(example_checkpoint: Path) -> None:
    kept = tasks_for(example_checkpoint)
    assert not kept.untied
    assert kept.ignore == ["lm_head"]
    untied = tasks_for(example_checkpoint, lm_head="quantize")
    assert untied.untied
    assert untied.specs["lm_head"] == Int4(128)
    assert "model.embed_tokens" not in untied.specs
    ignored = tasks_for(example_checkpoint, lm_head="quantize", ignore=("lm_head",))
    assert not ignored.untied
    assert ignored.ignore == ["lm_head"]


def test_with_fit_nearest_a_layer_gets_the_largest_group_that_divides_k(example_checkpoint: Path) -> None:
    """The checkpoint's K are 256 and 768, which 384 divides in part."""
    exact = message(lambda: tasks_for(example_checkpoint, spec=Int4(384)))
    for kind in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):
        assert f"model.layers.0.{kind} cannot be INT4 g384" in exact, "all of them are named at once"
    assert "with `group_size: 128`" in exact and "`fit: nearest`" in exact
    tasks = tasks_for(example_checkpoint, spec=Int4(384), fit="nearest")
    assert tasks.specs["model.layers.0.mlp.down_proj"] == Int4(384)
    assert tasks.specs["model.layers.0.mlp.gate_proj"] == Int4(128)
    assert "× INT4 g128, zero points (K = 256 is no multiple of group size 384)" in tasks.fitted


def test_a_model_without_linear_layers_is_told_what_it_has_instead(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    said = message(lambda: make_tasks(open_checkpoint(tmp_path), Recipe("r", spec=Int4(32))))
    assert "4 × Conv1D weight, not a Linear" in said


def test_with_fit_nearest_experts_and_what_is_beside_them_have_no_zero_points(tmp_path: Path) -> None:
    source = make_text(tmp_path, "qwen3_moe")
    tasks = tasks_for(source, spec=Int4(32), fit="nearest")
    assert set(tasks.specs.values()) == {Int4(32, symmetric=True)}
    assert tasks.fitted == "32 × INT4 g32, symmetric (transformers reads no zero points of experts)"
    for others in ({"spec": Int4(32)}, {"spec": Int4(32), "fit": "nearest", "ignore": ("*.experts.*",)}):
        assert set(tasks_for(source, **others).specs.values()) == {Int4(32)}


def test_with_fit_nearest_a_layer_that_engines_refuse_for_its_size_stays(tmp_path: Path) -> None:
    """Keys and values have 16 outputs each, and are served with the queries' 64 as one layer."""
    source = make_text(tmp_path, "llama", num_key_value_heads=1, intermediate_size=16)
    tasks = tasks_for(source, spec=Int4(16), fit="nearest")
    assert tasks.specs[f"{LAYER}.self_attn.k_proj"] == Int4(16)
    assert tasks.kept["kept, since N = 16 is below 32"] == [
        f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ("gate_proj", "up_proj")
    ]
    assert f"{LAYER}.mlp.down_proj" in tasks.kept["kept, since K = 16 is below 32"]
    assert {f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.down_proj"} <= set(tasks.ignore)
    assert f"{LAYER}.mlp.gate_proj" in tasks_for(source, spec=Int4(16)).specs


def test_with_fit_nearest_a_layer_that_the_format_cannot_have_stays(example_checkpoint: Path) -> None:
    recipe = {"spec": IQ2XXS(), "fit": "nearest"}
    assert tasks_for(example_checkpoint, **recipe).fitted == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IQ2XXS, "refuses", lambda self, n, k: "K is odd" if k == 768 else None)
        patch.setattr(IQ2XXS, "nearest", lambda self, n, k: None)
        tasks = tasks_for(example_checkpoint, **recipe)
    assert "model.layers.0.mlp.down_proj" in tasks.kept["kept, since K is odd"]
    assert "model.layers.0.mlp.down_proj" in tasks.ignore
    assert tasks.fitted == "4 × kept as it is (K is odd)"


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "kv" not in name])
def test_shipped_recipes_fit_every_layer(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.fit == "nearest" or isinstance(recipe.spec, Unquantized)
