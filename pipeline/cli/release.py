"""`pipeline release`: parses options, calls `release`, prints the verdict and what was published."""

import json
import sys
import textwrap
from typing import Any

import click

from ...base.stage_clock import in_words
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import SIZED
from .engine_options import EngineWord, RecipeWord, Registered, engine_options, exports
from .exit_status import INTERRUPTED
from .push import print_result
from .quantize import estimate_lines, formats_in
from .validate import WholeNumbers


@click.command("release")
@click.argument("model")
@click.option(
    "--recipe",
    type=RecipeWord(),
    default="int4-hqq",
    show_default=True,
    help="A shipped recipe, or a YAML file.",
)
@click.option("--to", required=True, metavar="ORG/NAME|folder:DIR", help="A Hub repository, or a folder.")
@click.option("--work", default="scalegate-work", show_default=True, metavar="DIR", help="Where to work.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of MODEL, where it is a Hub id.")
@click.option(
    "--export",
    type=Registered(exports),
    help="The convention to write; compressed-tensors where it stores the format.",
)
@click.option("--calibration", metavar="TEXT", help="For recipes that read a text: as for `quantize`.")
@click.option("--overwrite", is_flag=True, help="Quantize anew where DIR holds another or older job.")
@click.option("--baseline", metavar="MODEL", help="What to compare with; default MODEL itself.")
@click.option("--baseline-revision", help="Of the baseline, where it is a Hub id.")
@click.option(
    "--m",
    type=WholeNumbers(),
    help="Requests at once; default 1,2,4,8,16,32, and 1,8,32 for prompts of more than 1,024 tokens.",
)
@click.option(
    "--input-len",
    type=int,
    help="Prompt tokens a request. [default: 64; of KVarN so many that codes are read and a page is written]",
)
@click.option("--output-len", default=64, show_default=True, help="Output tokens a request.")
@click.option("--waves", default=1, show_default=True, help="Requests each client sends in one repeat.")
@click.option("--max-repeats", default=96, show_default=True, help="Blocks of repeats at one M at most.")
@click.option(
    "--warmups", default=1, show_default=True, help="Shorter repeats at each M first, on each side."
)
@click.option("--seed", type=int, help="Of the prompts; default a fresh one, which the verdict records.")
@click.option("--floor", type=click.FloatRange(min=0, min_open=True), help="Least throughput ratio.")
@click.option(
    "--engine",
    type=EngineWord(),
    default="embedded",
    show_default=True,
    help="URL: that of a running server.",
)
@click.option("--baseline-engine", type=EngineWord(), help="The same for the baseline; default as --engine.")
@click.option("--text", metavar="FILE", help="Held-out text for quality and prompts; default some code.")
@click.option(
    "--quality-tokens",
    type=click.IntRange(min=1024),
    default=8192,
    show_default=True,
    help="Held-out tokens to measure quality on.",
)
@engine_options(sized=SIZED)
@engine_options(Placement)
@click.option(
    "--rival", metavar="RECIPE|MODEL", help="What the artifact must be faster than: made by RECIPE, or MODEL."
)
@click.option(
    "--rival-from-m", type=click.FloatRange(min=1), help="The M from which on; default 4, or the recipe's."
)
@click.option(
    "--eval",
    "tasks",
    metavar="TASKS",
    help="lm-eval's tasks or task files, comma-separated; scores of both servers go into the verdict.",
)
@click.option("--sign", metavar="KEY", help="Sign the verdict with this SSH key.")
@click.option("--private", is_flag=True, help="Leave a repository that this release creates private.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to main.")
@click.option("--to-revision", metavar="BRANCH", help="Push to this branch of the repository.")
@click.option("--dry-run", is_flag=True, help="Say what would be made, measured and published; do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print stages, verdict and push as JSON.")
@click.pass_context
def command(
    context: click.Context,
    model: str,
    recipe: str,
    to: str,
    work: str,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Quantize MODEL, lay it out, prove that it scales, and publish it.

    Interrupted, run it again: what is done is found in the work folder and not done twice. Nothing is
    published unless the gate passes. The GPUs of --devices quantize together, a process each.

    Exit status: 0 published, 1 the gate failed, 2 inconclusive or unusable input, 70 a fault of
    Scalegate or the machine, 130 interrupted.

    \b
    Examples:
        pipeline release Qwen/Qwen3-8B --recipe int4-hqq --to ORG/Qwen3-8B-INT4
        pipeline release Qwen/Qwen3-8B --recipe int4-hqq --to ORG/Qwen3-8B-INT4 --dry-run
        pipeline release Qwen/Qwen3-8B --recipe nvfp4 --rival iq2-xxs --to ORG/Qwen3-8B-NVFP4
        pipeline release Qwen/Qwen3-8B --recipe kvarn-k4v2 --to ORG/Qwen3-8B-KVarN
        pipeline release Qwen/Qwen3-32B --devices all --to ORG/Qwen3-32B-INT4
        pipeline release ./my-model --recipe my-recipe.yaml --to folder:release/my-model-int4
    """
    if dry_run:
        _dry_run(model, recipe, to, work, as_json, options)
        return
    from ..machine.forked_servers import servers_forked

    try:
        with servers_forked(options["engine"], options["device"]):
            from ..commands.release import release
            from ..report.table import verdict_table

            result = release(model, recipe, to, work=work, **options)
    except KeyboardInterrupt:
        click.echo("Interrupted; run the same command again to resume.", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    elif result.verdict is not None:
        click.echo(verdict_table(result.verdict))
    if result.push is not None and not as_json:
        print_result(result.push)
    if result.push is None and result.verdict is not None:
        click.echo(f"Not published: the gate says {result.verdict.status}.", err=True)
        context.exit(result.verdict.exit_status)


def _dry_run(model: str, recipe: str, to: str, work: str, as_json: bool, options: dict[str, Any]) -> None:
    from ..commands.release_preview import preview_release

    found = preview_release(model, recipe, to, work=work, **options)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    load = found.validate
    beside = "" if load.rival is None else f", and faster than {load.rival}"
    scores = "" if load.tasks is None else f", scores of {load.tasks}"
    last = "" if load.last_seconds is None else f"; the last one took {in_words(load.last_seconds)}"
    lines = [
        "This would be done; nothing was:",
        f"quantize  {model} by {recipe} into {found.artifact}: {formats_in(found.quantize)}"
        + ("; it is there already, and is only checked" if found.done_before else ""),
        *estimate_lines(found.quantize),
        "layout    every layout of each shape at every M",
        f"validate  beside {load.baseline} on {load.engine}, at M = {', '.join(map(str, load.ms))}, "
        f"{load.input_len} tokens in and {load.output_len} out",
        f"  wants   at least {load.floor:g} of its throughput{beside}",
        f"  reads   {load.quality_tokens:,} tokens of text for quality{scores}",
        f"  sends   at least {load.requests:,} requests to each server",
        f"  memory  {load.memory / 1e6:,.0f} MB of weights in the servers",
        f"  time    {in_words(load.seconds)} to {in_words(load.most_seconds)} for the linear layers, by how "
        f"soon it is decided; the rest and starting the servers come on top{last}",
        f"push      to {found.target}, if the gate says pass: the weights and",
        *textwrap.wrap(", ".join(found.files), 100, initial_indent="  ", subsequent_indent="  "),
        *(f"Note: {note}." for note in found.notes),
    ]
    click.echo("\n".join(lines))
