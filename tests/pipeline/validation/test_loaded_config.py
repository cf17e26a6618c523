"""Configs as readers load them: two spellings of one thing are equal, and one that means another is not."""

import json
import shutil
from pathlib import Path

import pytest
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation.loaded_config import changes_beyond, contradictions, loaded_config
from scalegate.pipeline.validation.text_files import compare_text_files

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}


def edited(checkpoint: Path, folder: Path, remove: tuple[str, ...] = (), **values: object) -> Path:
    """A copy whose config.json has these values, and some keys less."""
    copy = shutil.copytree(checkpoint, folder / "edited")
    path = copy / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in remove}
    path.write_text(json.dumps(config | values))
    return copy


@pytest.mark.parametrize(
    ("remove", "values"),
    [
        (("rope_parameters",), {"rope_theta": 10000.0}),
        (("rope_parameters",), {"rope_theta": 10000, "rope_scaling": None}),
        (("dtype",), {"torch_dtype": "bfloat16"}),
        (("attention_bias", "layer_types", "sliding_window", "hidden_act"), {}),
        ((), {"transformers_version": "4.50.0", "use_cache": False, "pad_token_id": 0}),
    ],
)
def test_what_means_the_same_is_equal(example_checkpoint: Path, tmp_path: Path, remove, values):
    copy = edited(example_checkpoint, tmp_path, remove, **values)
    assert loaded_config(open_checkpoint(copy)) == loaded_config(open_checkpoint(example_checkpoint))


@pytest.mark.parametrize(
    ("remove", "values", "told"),
    [
        ((), {"rope_parameters": YARN}, "rope_parameters"),
        (("rope_parameters",), {"rope_theta": 10000.0, "rope_scaling": YARN}, "rope_parameters"),
        (("rope_parameters",), {"rope_theta": 1e6}, "rope_theta: 1000000.0, the baseline's 10000.0"),
        (("rms_norm_eps",), {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ((), {"use_sliding_window": True, "sliding_window": 512}, "sliding_window: 512"),
        ((), {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0, the baseline's null"),
        ((), {"auto_map": {"AutoModelForCausalLM": "other.Model"}}, "auto_map"),
        ((), {"architectures": ["Qwen2ForCausalLM"]}, "architectures"),
        (("rope_parameters",), {}, ""),
    ],
)
def test_what_means_another_thing_is_named(example_checkpoint: Path, tmp_path: Path, remove, values, told):
    copy = edited(example_checkpoint, tmp_path, remove, **values)
    found = compare_text_files(open_checkpoint(copy), open_checkpoint(example_checkpoint))
    # The default base of this model type is the bundled checkpoint's own.
    expected = [("config", True)] if told else []
    assert [(difference.part, told in difference.where) for difference in found] == expected


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rope_theta": 1e6}, "rope_theta is 1e+06, rope_parameters's rope_theta is 10000"),
        ({"rope_scaling": YARN}, "rope_parameters is of type default, rope_scaling of type yarn"),
        ({"torch_dtype": "float16"}, "dtype is bfloat16, torch_dtype is float16"),
        ({"rope_theta": 10000.0, "torch_dtype": "torch.bfloat16"}, ""),
    ],
)
def test_what_one_config_says_twice_has_to_agree(example_checkpoint: Path, values, told):
    config = json.loads((example_checkpoint / "config.json").read_text())
    assert "; ".join(contradictions(config | values)) == told
    inside = "; ".join(contradictions({"text_config": config | values}))
    assert inside == (f"text_config: {told}" if told else "")


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, []),
        ({"rope_scaling": YARN}, [512]),
        (
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}, "sliding_window": 64},
            [64, 512],
        ),
        ({"use_sliding_window": False, "sliding_window": 64}, []),
        ({"text_config": {"attention_chunk_size": 8192}}, [8192]),
        ({"sliding_window": None, "original_max_position_embeddings": 4096}, [4096]),
    ],
)
def test_where_a_config_changes_what_is_computed(config, positions):
    assert changes_beyond(config) == positions
