"""The pages build with no broken link, agree with the code, and show only commands that parse."""

import importlib
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import scalegate
import torch
from click import Context
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from scalegate.docs.generate import tables
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.kv.cuda import E4M3_FROM
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import LARGEST_CODED_DIM, LEAST_CODED_DIM, KVShape
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import COMMANDS, main
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.recipe_file import load_recipe, shipped_recipes
from scalegate.pipeline.validation.held_out import read_held_out
from scalegate.serving_check.adapters.all_engines import ENGINES

from .bench.quantization.model_nats import nats_per_token
from .serving_check.gate_samples import sample_verdict

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE_FOLDERS = (
    "base", "kernels", "layouts", "vllm_plugin", "sglang_plugin", "serving_check", "pipeline", "packaging",
    "tests", "docs", "examples",
)  # fmt: skip
SCRIPT = ROOT / "examples" / "whole_way.sh"


def build_pages(folder: Path, site: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(folder), site_dir=str(site), strict=True)
    build(config)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_pages(DOCS, folder)
    return folder


def test_the_pages_build_and_a_broken_link_is_seen(site: Path, tmp_path: Path):
    assert (site / "tutorial.html").is_file()
    spoilt = shutil.copytree(DOCS, tmp_path / "docs")
    (spoilt / "index.md").write_text("[nowhere](nothing.md)")
    with pytest.raises(Abort):
        build_pages(spoilt, tmp_path / "site")


def test_references_are_generated_from_the_commands_and_the_docstrings(site: Path):
    commands = (site / "command-line.html").read_text(encoding="utf-8")
    assert set(COMMANDS) == set(re.findall(r"<h2[^>]*>pipeline (\w+)</h2>", commands))
    assert "--kv-cache-dtype" in commands
    names = re.findall(r"<h3[^>]*>(\w+)</h3>", (site / "python.html").read_text(encoding="utf-8"))
    assert sorted(names) == sorted(scalegate.__all__)


@pytest.mark.parametrize(("page", "table"), tables.TABLES.items())
def test_committed_tables_are_what_the_code_says(page: str, table: Callable[[], str]):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert tables.with_table(text, table()) == text, "run: python -P -m scalegate.docs.generate.tables"
    assert tables.with_table(text, table() + "| another | row |") != text


def test_links_outside_the_site_lead_to_files():
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "RELEASING.md")]
    assert [target for page in pages for target in relative_links(page) if not target.exists()] == []
    assert len(relative_links(ROOT / "README.md")) > 8


def relative_links(page: Path) -> list[Path]:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [page.parent / link for link in links]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_a_file_that_is_named_exists(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = {*re.findall(r"[\w/-]*\w\.(?:py|yaml|sh|txt)\b", text), *re.findall(r"`(\w[\w/]*/)`", text)}
    paths = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*")]
    known = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in [*paths, *ROOT.iterdir()]]
    assert named and [file for file in named if not any(path.endswith(f"/{file}") for path in known)] == []
    assert not any(path.endswith("/nowhere.py") for path in known)


def test_the_readme_is_short_and_its_first_screen_has_picture_commands_and_tutorial():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    first_screen = text.partition("\n## ")[0]
    for part in ("docs/pictures/", "make example", "pipeline release", "docs/tutorial.md"):
        assert part in first_screen


def test_the_changelog_is_short_and_its_last_release_is_the_version_that_is_built():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    releases = [line.split()[1] for line in lines if re.match(r"## \d", line)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert releases[0] == project["version"]


def test_a_newcomers_questions_are_answered_by_files_that_exist():
    text = (DOCS / "contributing" / "where-is-it.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+\?) \| `(.+/)` \| `(.+)` \| (\d) \|$", text, re.MULTILINE)
    assert len(rows) == 20
    assert [row for row in rows if not (ROOT / row[1] / row[2]).is_file()] == []
    assert max(int(guesses) for *_, guesses in rows) <= 2


def test_the_public_import_paths_of_plugins_are_there():
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| (.+) \| `(scalegate[\w.]+)` \| `(\w+)\.add` \|$", text, re.MULTILINE)
    helpers = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `(scalegate[\w.]*)` \|$", text, re.MULTILINE)
    assert len(rows) == 7 and len(helpers) == 7
    examples = re.findall(r"`(tests/\w+\.py)`", text)
    assert len(examples) == 3 and all((ROOT / example).is_file() for example in examples)
    paths = [(name, module) for names, module in helpers for name in re.findall(r"`(\w+)`", names)]
    paths += [(name, module) for names, module, _ in rows for name in re.findall(r"`(\w+)`", names)]
    paths += [(registry, module) for _, module, registry in rows]
    assert [path for path in paths if not hasattr(importlib.import_module(path[1]), path[0])] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("recipes.md", shipped_recipes()),
        ("formats.md", [*WEIGHT_FORMATS, *EXPORTS, *KV_FORMATS]),
        ("verdict.md", [check.name for check in sample_verdict({1: 1.0}).checks]),
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
    heads = f"heads of {LEAST_CODED_DIM} to {LARGEST_CODED_DIM} channels"
    assert heads in text
    gpus = (DOCS / "my-gpu.md").read_text(encoding="utf-8")
    assert heads in gpus
    assert "compute capability {}.{}".format(*E4M3_FROM) in gpus


def commands_of(markdown: str) -> list[str]:
    """The lines of its `sh` blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_tutorial_shows_the_script_that_is_run_and_nothing_else():
    script = SCRIPT.read_text(encoding="utf-8").splitlines()
    run = [line for line in script if line and not line.startswith(("#", "set "))]
    assert commands_of((DOCS / "tutorial.md").read_text(encoding="utf-8")) == run


PAGES = ["tutorial", "recipes", "my-model", "my-gpu", "engines", "publishing", "serving", "batch-invariance"]


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


def test_the_examples_state_what_their_text_costs(example_checkpoint: Path, heldout_text: Path):
    checkpoint = open_checkpoint(str(example_checkpoint))
    text = read_held_out(heldout_text, checkpoint, checkpoint, 8192)
    model = load_model(checkpoint.folder, device="cpu", dtype=torch.float32, progress=False).model
    measured = nats_per_token(model, text.windows)
    for readme in (ROOT / "examples" / "README.md", example_checkpoint / "README.md"):
        [stated] = re.findall(r"([\d.]+) nats", readme.read_text(encoding="utf-8"))
        assert measured == pytest.approx(float(stated), abs=0.001), readme
