"""`pipeline quantize`: parses options, calls `quantize` and prints a summary."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...base.errors import UserError
from ...base.option_fields import text_of
from ...base.stage_clock import in_words
from ...serving_check.engine.options import AUTO, UNQUANTIZED, EngineOptions
from ..quantization.options import BudgetOptions, QuantizeOptions
from ..records.artifact import Artifact
from .options import options_from, recipe_option

if TYPE_CHECKING:
    from ..quantization.estimate import Estimate


@click.command("quantize")
@click.argument("model")
@recipe_option
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the artifact."
)
@options_from(QuantizeOptions)
@options_from(EngineOptions, only=["device"])
@click.option(
    "--devices",
    metavar="N,N,...|all",
    help="GPUs by number, or all; one process on each GPU does a share of the work.",
)
@options_from(BudgetOptions)
@click.option("--dry-run", is_flag=True, help="Show sizes, memory and time; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def command(
    context: click.Context,
    model: str,
    recipe: str,
    out: Path,
    device: str | None,
    devices: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Quantize MODEL, a folder or a Hub id, into an artifact: a checkpoint folder and scalegate.json.

    MODEL is read and written shard by shard. If the command is interrupted, run it again, and it continues
    where it stopped.

    \b
    Recipes: int4-symmetric (groups of 128), int4-hqq (the same with zero points), int4-hqq-g64,
    int4-hqq-g32, int4-gptq, int4-awq, int4-awq-gptq, int4-best, int8, nvfp4, nvfp4-gptq, nvfp4-best,
    nvfp4-w4a4, nvfp4-fp8, mxfp4, mxfp4-gptq, mxfp4-best, mxfp4-experts, mxfp8, iq2-xxs, fp8, fp8-block,
    fp8-static, int8-w8a8, int4-fp8, int4-fp8-gptq, int4-fp8-best, or your own.
    Recipes for keys and values alone: fp8-kv, int4-kv, nvfp4-kv, kvarn-k4v2, kvarn-k4v4.

    \b
    --calibration hub:OWNER/NAME[/CONFIGURATION][@REVISION][:SPLIT[:COLUMN]] reads a data set; the
    split is `train` and the column `text` unless you name others.

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
        device = _first_device(context, device, devices, dry_run)
    if dry_run:
        _dry_run(model, recipe, out, device, as_json, options)
        return
    from ..commands.quantize import quantize

    artifact = quantize(model, recipe, out, device=device, **options)
    if int(os.environ.get("RANK", "0")):
        return
    summary = _summary(artifact, out)
    click.echo(json.dumps(summary) if as_json else _as_text(summary))


def _first_device(context: click.Context, device: str | None, devices: str, dry_run: bool) -> str:
    """The only device in `devices`. If there are several, the command runs on each, and this process ends."""
    from ..quantization.shards.launch import devices_of, run_on

    if device not in (None, AUTO):
        raise UserError("--devices and --device both name a device; leave one of them out")
    chosen = devices_of(devices)
    if len(chosen) > 1 and not dry_run:
        context.exit(run_on(chosen, _words(context)))
    return chosen[0]


def _dry_run(
    model: str, recipe: str, out: Path, device: str | None, as_json: bool, options: dict[str, Any]
) -> None:
    from ..commands.quantize import preview

    estimate = preview(model, recipe, out, device=device, **options)
    if as_json:
        click.echo(json.dumps(asdict(estimate)))
        return
    click.echo(f"{out}: {formats_in(estimate)} would be quantized; nothing is written")
    click.echo("\n".join(estimate_lines(estimate)))


def formats_in(estimate: "Estimate") -> str:
    return " and ".join(f"{count} × {label}" for label, count in estimate.formats.items()) or "no weights"


def estimate_lines(estimate: "Estimate") -> list[str]:
    return [
        *_kv_lines(estimate.kv_cache, estimate.text),
        f"  reads   {estimate.bytes_read / 1e6:,.1f} MB",
        f"  writes  {estimate.bytes_written / 1e6:,.1f} MB in {estimate.shards} "
        f"{'shard' if estimate.shards == 1 else 'shards'}, {estimate.kept} tensors as they are; "
        f"{estimate.free / 1e6:,.0f} MB are free there",
        f"  memory  about {estimate.memory / 1e6:,.0f} MB",
        f"  time    about {in_words(estimate.seconds)} of quantizing, on one process"
        + ("" if estimate.text is None else "; reading the text comes on top"),
    ]


def _kv_lines(kv_format: str, text: str | None) -> list[str]:
    if kv_format == UNQUANTIZED:
        return []
    from ..quantization.calibration.text_source import kv_description

    return [f"  keys and values: {kv_description(kv_format, text)}"]


def _words(context: click.Context) -> list[str]:
    """The words of the command without --devices."""
    words = ["quantize"]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name == "devices" or value in (None, False):
            continue
        if isinstance(parameter, click.Option):
            words.append(parameter.opts[0])
        if value is not True:
            words.append(text_of(value))
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
