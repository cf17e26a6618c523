"""Draws sentences at random from the documentation, the commands' help, error messages and docstrings.

A reader who knows the field judges each: understood at first reading, or not. The same seed on the same tree
draws the same sentences. Tables, code and pictures, on pages and in docstrings, are left out. The judgements
are in `results/sentences.md`.

    python -P tests/bench/sentences.py --seed 36
"""

import argparse
import ast
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from click import Command, Context, Option
from scalegate.pipeline.cli.main import COMMANDS
from scalegate.pipeline.cli.main import main as pipeline

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/**/*.md")
SOURCES = ("base", "kernels", "layouts", "serving_check", "pipeline", "vllm_plugin")
ERRORS = ("UserError",)
LEAST_WORDS = 5
COLUMNS = re.compile(r"\S {2,}\S")
"""In a docstring: a table, or a picture of bytes."""
ARGUMENT = re.compile(r"^(?=\*{0,2}\w+(?:, \*{0,2}\w+)*(?: \[[^\]\n]*\])?: )", flags=re.MULTILINE)
"""In a docstring: the beginning of a line that explains an argument, a field or a tensor."""
Sentence = tuple[str, str]
"""Where it stands, and its words."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--each", type=int, default=10, help="sentences of each kind")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    for kind, read in KINDS.items():
        print(f"\n## {kind}\n\n| where | sentence | at first reading |\n| --- | --- | --- |")
        for where, words in draw.sample(sorted(set(read())), options.each):
            print(f"| `{where}` | {words.replace('|', '/')} | |")


def documentation() -> Iterator[Sentence]:
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            paragraphs = re.split(r"\n\s*\n|\n(?=[-#|>]|\d+\. )", text)
            for paragraph in paragraphs:
                if not paragraph.startswith(("#", "|", "<", "!")):
                    yield from sentences(str(path.relative_to(ROOT)), paragraph.lstrip("- "))


def helps() -> Iterator[Sentence]:
    for name in COMMANDS:
        command = pipeline.get_command(Context(pipeline), name)
        assert isinstance(command, Command)
        yield from sentences(f"pipeline {name} --help", (command.help or "").partition("Examples:")[0])
        for parameter in command.params:
            if isinstance(parameter, Option) and parameter.help:
                yield from sentences(f"pipeline {name} {parameter.opts[0]}", parameter.help)


def errors() -> Iterator[Sentence]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args:
                yield from sentences(f"{path}:{node.lineno}", literal(node.args[0]))


def docstrings() -> Iterator[Sentence]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                where = f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}".strip()
                for paragraph in text.partition("Examples:")[0].split("\n\n"):
                    if not (COLUMNS.search(paragraph) or paragraph.startswith(" ")):
                        are_arguments = ARGUMENT.match(paragraph) is not None
                        for part in ARGUMENT.split(paragraph) if are_arguments else [paragraph]:
                            yield from sentences(where, part)


KINDS: dict[str, Callable[[], Iterator[Sentence]]] = {
    "Documentation": documentation,
    "Help": helps,
    "Error messages": errors,
    "Docstrings": docstrings,
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def literal(node: ast.expr) -> str:
    """A string, with `{}` for what is filled in; empty for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def sentences(where: str, text: str) -> Iterator[Sentence]:
    words = " ".join(text.replace("\b", " ").split())
    for sentence in re.split(
        r"(?<=[.?!])\s+(?=[A-Z`*\"\[]|vLLM|transformers|torch|compressed-tensors)", words
    ):
        if len(sentence.split()) >= LEAST_WORDS:
            yield where, sentence


if __name__ == "__main__":
    main()
