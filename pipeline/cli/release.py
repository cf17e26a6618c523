"""`pipeline release`: parses options, calls `release`, prints the verdict and what was published."""

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from ...base.stage_clock import in_words
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import SIZED, EngineOptions
from ...serving_check.settings import Bounds, WorkloadSettings
from ..publishing.options import PublishOptions
from ..quantization.options import QuantizeOptions
from ..validation.options import ValidateOptions
from .exit_status import INTERRUPTED, UNUSABLE
from .options import options_from, recipe_option
from .push import print_result
from .quantize import estimate_lines, formats_in

if TYPE_CHECKING:
    from ...serving_check.evidence.verdict import Verdict


@click.command("release")
@click.argument("model")
@recipe_option
@click.option("--to", required=True, metavar="ORG/NAME|folder:DIR", help="A Hub repository, or a folder.")
@click.option(
    "--work",
    default="scalegate-work",
    show_default=True,
    metavar="DIR",
    help="Folder for intermediate files.",
)
@options_from(QuantizeOptions, ValidateOptions, WorkloadSettings, Bounds)
@options_from(EngineOptions, Placement, sized=SIZED)
@options_from(PublishOptions)
@click.option("--dry-run", is_flag=True, help="Show what would be made, measured and published; do nothing.")
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
    """Quantize MODEL, choose its layouts, prove that it scales, and publish it.

    If the command is interrupted, run it again, and it continues from the files in the work folder. Nothing
    is published unless the gate passes. With --devices, each named GPU quantizes a share of the weights.

    Exit status: 0 published, 1 the gate failed, 2 inconclusive, speed not judged or unusable input,
    70 a fault of Scalegate or the machine, 130 interrupted.

    \b
    Examples:
        pipeline release Qwen/Qwen3-8B --recipe int4-symmetric --to ORG/Qwen3-8B-INT4
        pipeline release Qwen/Qwen3-8B --recipe int4-symmetric --to ORG/Qwen3-8B-INT4 --dry-run
        pipeline release Qwen/Qwen3-8B --recipe nvfp4 --rival iq2-xxs --to ORG/Qwen3-8B-NVFP4
        pipeline release Qwen/Qwen3-8B --recipe kvarn-k4v2 --to ORG/Qwen3-8B-KVarN
        pipeline release Qwen/Qwen3-32B --devices all --to ORG/Qwen3-32B-INT4
        pipeline release ./my-model --recipe my-recipe.yaml --to folder:release/my-model-int4
    """
    if dry_run:
        _dry_run(model, recipe, to, work, as_json, options)
        return
    from .forked_servers import servers_forked

    try:
        with servers_forked(options["engine"] or DEFAULT_ENGINE, options["device"]):
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
        click.echo(f"Not published: {_why_not(result.verdict)}", err=True)
        context.exit(result.verdict.exit_status or UNUSABLE)


def _why_not(verdict: "Verdict") -> str:
    """Why a verdict was not published, and what to do about a pass."""
    if verdict.status != "pass":
        return f"the gate says {verdict.status}."
    return "speed was not judged. `pipeline push --allow-unjudged-speed` publishes it all the same."


def _dry_run(model: str, recipe: str, to: str, work: str, as_json: bool, options: dict[str, Any]) -> None:
    from ..commands.release_preview import preview_release

    preview = preview_release(model, recipe, to, work=work, **options)
    if as_json:
        click.echo(json.dumps(preview.to_json(), indent=2, ensure_ascii=False))
        return
    load = preview.validate
    beside = "" if load.rival is None else f", and faster than {load.rival}"
    scores = "" if load.tasks is None else f", scores of {load.tasks}"
    between = f" and {load.drawn_ms} drawn between them" if load.drawn_ms else ""
    last = "" if load.last_seconds is None else f"; the last one took {in_words(load.last_seconds)}"
    lines = [
        "This would be done; nothing was:",
        f"quantize  {model} by {recipe} into {preview.artifact}: {formats_in(preview.quantize)}"
        + ("; it is there already, and is only checked" if preview.done_before else ""),
        *estimate_lines(preview.quantize),
        "layout    every layout of each shape at every M",
        f"validate  beside {load.baseline} on {load.engine}, at M = {', '.join(map(str, load.ms))}{between}, "
        f"{load.input_len} tokens in and {load.output_len} out",
        f"  wants   at least {load.floor:g} of its throughput{beside}",
        f"  reads   {load.quality_tokens:,} tokens of text for quality{scores}",
        f"  sends   at least {load.requests:,} requests to each server",
        f"  memory  {load.memory / 1e6:,.0f} MB of weights in the servers",
        f"  time    {in_words(load.seconds)} to {in_words(load.most_seconds)} for the linear layers, by how "
        f"soon it is decided; the rest and starting the servers come on top{last}",
        f"push      to {preview.target}, if the gate says pass: the weights and",
        *textwrap.wrap(", ".join(preview.files), 100, initial_indent="  ", subsequent_indent="  "),
        *(f"Note: {note}." for note in preview.notes),
    ]
    click.echo("\n".join(lines))
