"""`pipeline quantize`: options in, `pipeline.quantize.quantize` called, a summary out."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...base.errors import UserError
from ...base.stage_clock import in_words
from ...serving_check.engine.options import UNQUANTIZED
from ..records.artifact import Artifact
from .engine_options import RecipeWord, Registered, exports

if TYPE_CHECKING:
    from ..quantization.estimate import Estimate


@click.command("quantize")
@click.argument("model")
@click.option(
    "--recipe",
    type=RecipeWord(),
    default="int4-hqq",
    show_default=True,
    help="A shipped recipe or a YAML file.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the artifact."
)
@click.option(
    "--export",
    type=Registered(exports),
    help="The convention to write; compressed-tensors where it stores the format.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--devices", help="all, or GPUs by number such as 0,1: a process each, which share the work.")
@click.option(
    "--calibration",
    metavar="TEXT",
    help="For recipes that read a text: a file, hub:OWNER/NAME, or self for what the model writes.",
)
@click.option("--target-bits", type=float, help="INT4 group sizes and INT8 chosen for so many bits a weight.")
@click.option("--max-kl", type=float, help="The same, for the fewest bits within this divergence, in nats.")
@click.option("--dry-run", is_flag=True, help="Say sizes, memory and time, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Start over where the folder holds another or older job.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def command(
    context: click.Context,
    model: str,
    recipe: str,
    out: Path,
    export: str | None,
    revision: str | None,
    device: str,
    devices: str | None,
    calibration: str | None,
    target_bits: float | None,
    max_kl: float | None,
    dry_run: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantize MODEL, a folder or a Hub id, into an artifact: a checkpoint folder and scalegate.json.

    It reads and writes shard by shard. Interrupted, the same command takes it up where it stopped.

    \b
    Recipes: int4-hqq (groups of 128), int4-hqq-g64, int4-hqq-g32, int4-gptq, int4-awq,
    int4-awq-gptq, int4-best, int8, nvfp4, nvfp4-gptq, nvfp4-best, nvfp4-w4a4, iq2-xxs, or your own.
    For keys and values alone: fp8-kv, int4-kv, nvfp4-kv, kvarn-k4v2, kvarn-k4v4.

    \b
    --calibration takes a data set, of the split `train` and the column `text` unless it says others, as
    hub:OWNER/NAME[/CONFIGURATION][@REVISION][:SPLIT[:COLUMN]].

    \b
    Examples:
        pipeline quantize Qwen/Qwen3-8B --out qwen3-8b-int4
        pipeline quantize ./my-model --recipe int4-hqq-g64 --out out
        pipeline quantize ./my-model --recipe mine.yaml --export torchao --out out
        pipeline quantize ./my-model --recipe int4-gptq --calibration texts.jsonl --out out
        pipeline quantize ./my-model --target-bits 4.5 --calibration texts.jsonl --out out
        pipeline quantize ./my-model --recipe kvarn-k4v2 --out out
        pipeline quantize ./my-model --recipe fp8-kv --calibration texts.jsonl --out out
        pipeline quantize ./my-70b --dry-run --out out
        pipeline quantize ./my-70b --devices all --out out
        torchrun --nproc-per-node 8 -m scalegate.pipeline quantize ./my-70b --out out
    """
    if devices is not None:
        from ..quantization.shards.launch import devices_of, run_on

        if device != "auto":
            raise UserError("--devices and --device both say where it runs; leave one of them out")
        chosen = devices_of(devices)
        if len(chosen) > 1 and not dry_run:
            context.exit(run_on(chosen, _words(context)))
        device = chosen[0]
    if dry_run and (target_bits is not None or max_kl is not None):
        raise UserError("--target-bits and --max-kl choose formats by measuring them; leave --dry-run out")
    if dry_run:
        _dry_run(model, recipe, out, revision, export, device, calibration, as_json)
        return
    from ..commands.quantize import quantize

    artifact = quantize(
        model,
        recipe,
        out,
        revision=revision,
        export=export,
        device=device,
        calibration=calibration,
        target_bits=target_bits,
        max_kl=max_kl,
        overwrite=overwrite,
    )
    if int(os.environ.get("RANK", "0")):
        return
    summary = _summary(artifact, out)
    if as_json:
        click.echo(json.dumps(summary))
        return
    click.echo(_as_text(summary))


def _dry_run(
    model: str,
    recipe: str,
    out: Path,
    revision: str | None,
    export: str | None,
    device: str,
    calibration: str | None,
    as_json: bool,
) -> None:
    from ..commands.quantize import preview

    found = preview(
        model, recipe, out, revision=revision, export=export, device=device, calibration=calibration
    )
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    click.echo(f"{out}: {formats_in(found)} would be quantized; nothing is written")
    click.echo("\n".join(estimate_lines(found)))


def formats_in(found: "Estimate") -> str:
    return " and ".join(f"{count} × {label}" for label, count in found.formats.items()) or "no weights"


def estimate_lines(found: "Estimate") -> list[str]:
    return [
        *_kv_lines(found.kv_cache, found.text),
        f"  reads   {found.bytes_read / 1e6:,.1f} MB",
        f"  writes  {found.bytes_written / 1e6:,.1f} MB in {found.shards} "
        f"{'shard' if found.shards == 1 else 'shards'}, {found.kept} tensors as they are; "
        f"{found.free / 1e6:,.0f} MB are free there",
        f"  memory  about {found.memory / 1e6:,.0f} MB",
        f"  time    about {in_words(found.seconds)} of quantizing, on one process"
        + ("" if found.text is None else "; reading the text comes on top"),
    ]


def _kv_lines(kv_format: str, text: str | None) -> list[str]:
    if kv_format == UNQUANTIZED:
        return []
    from ..quantization.calibration.text_source import kv_description

    return [f"  keys and values: {kv_description(kv_format, text)}"]


def _words(context: click.Context) -> list[str]:
    """The command as it was given, but for --devices."""
    words = ["quantize"]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name == "devices" or value in (None, False):
            continue
        if isinstance(parameter, click.Option):
            words.append(parameter.opts[0])
        if value is not True:
            words.append(str(value))
    return words


def _summary(artifact: Artifact, out: Path) -> dict[str, Any]:
    quantization = artifact.quantization
    return {
        "artifact": str(out),
        "source": artifact.source,
        "revision": artifact.source_revision,
        "recipe": artifact.recipe["name"],
        "export": quantization["export"],
        "quantized": len(quantization["modules"]),
        "formats": {summary["label"]: summary["modules"] for summary in quantization["formats"]},
        "kept": {reason: len(names) for reason, names in quantization["kept"].items()},
        "bits_per_weight": quantization["bits_per_weight"],
        "kv_cache": artifact.kv_cache,
        "relative_error": quantization["relative_error"],
        **{key: quantization[key] for key in ("sensitivity", "calibration") if key in quantization},
        "left_out": artifact.left_out,
        "bytes": sum(record.size for record in artifact.files.values()),
    }


def _as_text(summary: dict[str, Any]) -> str:
    from ..records.sensitivity_table import KEPT_BY_BUDGET, table_lines

    formats = " and ".join(f"{count} × {label}" for label, count in summary["formats"].items())
    size = f"{summary['bytes'] / 1e6:,.1f} MB in all"
    counted = "each"
    if KEPT_BY_BUDGET in summary["kept"]:
        counted = "a weight with those that are kept by the budget"
    if formats:
        lines = [
            f"{summary['artifact']}: {summary['quantized']} linear weights quantized ({formats}), "
            f"{summary['bits_per_weight']:g} bits {counted}, {size}",
            f"  relative error of the weights {summary['relative_error']:.4f}",
        ]
    else:
        lines = [f"{summary['artifact']}: weights as they are, {size}"]
    lines += _kv_lines(summary["kv_cache"], summary.get("calibration", {}).get("source"))
    if "sensitivity" in summary:
        lines += [f"  {line}" for line in table_lines(summary["sensitivity"])]
    lines += [f"  kept: {count} × {reason}" for reason, count in summary["kept"].items()]
    return "\n".join(lines)
