"""What Tab offers: commands, and the names that registries hold."""

import re

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.pipeline.cli.main import COMMANDS, main
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from scalegate.pipeline.records.recipe_file import shipped_recipes
from scalegate.serving_check.adapters.all_engines import ENGINES


def offered(words: list[str], incomplete: str = "") -> list[str]:
    found = ShellComplete(main, {}, "pipeline", "_PIPELINE_COMPLETE").get_completions(words, incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], COMMANDS),
        (["quantize", "model", "--recipe"], shipped_recipes()),
        (["release", "model", "--recipe"], shipped_recipes()),
        (["quantize", "model", "--export"], EXPORTS),
        (["serve", "model", "--kv-cache-dtype"], KV_FORMATS),
        (["validate", "model", "--engine"], ENGINES),
    ],
)
def test_names_complete(words: list[str], names):
    assert set(names) <= set(offered(words))
    first = sorted(names)[0]
    assert first in offered(words, first[:3]) and offered(words, "no-such") in ([], ["no-such"])


def test_a_recipe_of_ones_own_completes_as_a_file():
    [item] = ShellComplete(main, {}, "pipeline", "_PIPELINE_COMPLETE").get_completions(
        ["quantize", "model", "--recipe"], "./mi"
    )
    assert item.type == "file"


def test_the_shells_own_words_work():
    words = {"_PIPELINE_COMPLETE": "bash_complete", "COMP_WORDS": "pipeline quantize m --recipe nv"}
    runner = CliRunner()
    done = runner.invoke(main, [], prog_name="pipeline", env={**words, "COMP_CWORD": "4"})
    assert done.exit_code == 0, done.output
    names = sorted(name for name in shipped_recipes() if name.startswith("nv"))
    assert done.stdout.split() == [f"plain,{name}" for name in names] and "nvfp4-gptq" in names
    source = runner.invoke(main, [], prog_name="pipeline", env={"_PIPELINE_COMPLETE": "bash_source"})
    assert source.exit_code == 0 and "complete -o nosort -F _pipeline_completion pipeline" in source.stdout


def test_the_help_of_quantize_names_every_shipped_recipe():
    text = CliRunner().invoke(main, ["quantize", "--help"]).output
    assert set(shipped_recipes()) <= set(re.findall(r"[\w-]+", text))
