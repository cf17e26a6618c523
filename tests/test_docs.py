"""The pages build with no broken link, name all that there is, and show only commands that are run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click import Context
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import LARGEST_CODED_DIM, LEAST_CODED_DIM, KVShape
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.recipe import load_recipe, shipped_recipes
from scalegate.pipeline.validation.held_out import read_held_out
from scalegate.serving_check.adapters.all_engines import ENGINES
from scalegate.serving_check.quality import score

from .serving_check.gate_samples import sample_verdict

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SCRIPT = ROOT / "examples" / "whole_way.sh"


def build_pages(folder: Path, site: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(folder), site_dir=str(site), strict=True)
    build(config)


def test_the_pages_build_and_a_broken_link_is_seen(tmp_path: Path):
    build_pages(DOCS, tmp_path / "site")
    assert (tmp_path / "site" / "tutorial.html").is_file()
    spoilt = shutil.copytree(DOCS, tmp_path / "docs")
    (spoilt / "index.md").write_text("[nowhere](nothing.md)")
    with pytest.raises(Abort):
        build_pages(spoilt, tmp_path / "site")


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("recipes.md", shipped_recipes()),
        ("formats.md", [*WEIGHT_FORMATS, *EXPORTS, *KV_FORMATS]),
        ("gate.md", [check.name for check in sample_verdict({1: 1.0}).checks]),
    ],
)
def test_each_page_names_all_that_there_is(page: str, names):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = {*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)}
    assert set(names) - named == set()


def test_the_engines_page_names_the_kv_formats_that_each_engine_is_started_with():
    text = (DOCS / "engines.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| (vLLM|SGLang) \| `(\w+)` \| `(.+)` \|$", text, re.MULTILINE))
    words = {
        (engine.title, name): engine.kv_cache_words(name)
        for engine in map(ENGINES.__getitem__, ("vllm", "sglang"))
        for name in KV_FORMATS
    }
    assert rows == {(title, name, " ".join(found)) for (title, name), found in words.items() if found}


def test_the_formats_page_says_what_kvarn_keeps_of_a_request_and_which_heads_a_gpu_serves():
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    shape = KVShape(8, 128, 128, torch.bfloat16, 32)
    for name in ("kvarn_k4v2_g128", "kvarn_k4v4_g64"):
        megabytes = 36 * KV_FORMATS[name].bytes_per_request(shape) / 1e6
        assert f"{megabytes:.1f} MB" in text
    assert f"heads of {LEAST_CODED_DIM} to {LARGEST_CODED_DIM} channels" in text


def commands_of(markdown: str) -> list[str]:
    """The lines of its `sh` blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_tutorial_shows_the_script_that_is_run_and_nothing_else():
    script = SCRIPT.read_text(encoding="utf-8").splitlines()
    run = [line for line in script if line and not line.startswith(("#", "set "))]
    assert commands_of((DOCS / "tutorial.md").read_text(encoding="utf-8")) == run


PAGES = ["tutorial", "recipes", "quantize", "engines", "jobs", "batch-invariance"]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_a_page_is_one_that_there_is(page: str, monkeypatch):
    # What follows `pipeline` is parsed as the command line parses it; nothing is run.
    lines = commands_of((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    calls = [shlex.split(line, comments=True) for line in lines]
    calls = [words[words.index("pipeline") + 1 :] for words in calls if "pipeline" in words]
    assert calls
    for words in calls:
        parse(words)
    with pytest.raises(Exception, match="No such option"):
        parse([*calls[0], "--no-such-option"])


def parse(words: list[str]) -> None:
    command = main.get_command(Context(main), words[0])
    assert command is not None, words
    command.make_context(words[0], words[1:])


def test_the_recipe_on_the_page_is_one(tmp_path: Path):
    [block] = re.findall(r"```yaml\n(.*?)```", (DOCS / "recipes.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(block)
    assert load_recipe(path).name == "mine"


def test_the_examples_state_what_the_shipped_text_costs(example_checkpoint: Path):
    checkpoint = open_checkpoint(str(example_checkpoint))
    text = read_held_out(None, checkpoint, checkpoint, 8192)
    model = load_model(checkpoint.folder, device="cpu", dtype=torch.float32, progress=False).model
    measured = score(model, text.windows).nats_per_token
    for readme in (ROOT / "examples" / "README.md", example_checkpoint / "README.md"):
        [stated] = re.findall(r"([\d.]+) nats", readme.read_text(encoding="utf-8"))
        assert measured == pytest.approx(float(stated), abs=0.001), readme
