"""`pipeline adopt`: parses options, calls `adopt` and prints a summary."""

import json
from pathlib import Path

import click

from ..validation.options import ValidateOptions
from .options import options_from


@click.command("adopt")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--baseline", metavar="MODEL", required=True, help="The unquantized checkpoint: a folder or a Hub id."
)
@options_from(ValidateOptions, only=["baseline_revision"])
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(checkpoint: Path, baseline: str, baseline_revision: str | None, as_json: bool) -> None:
    """Write the manifest of CHECKPOINT, a folder that another tool quantized.

    Adopting measures each quantized module against the baseline. After adopting,
    `validate`, `push` and `verify` accept CHECKPOINT like an artifact that Scalegate quantized.

    \b
    Examples:
        pipeline adopt ./Qwen3-8B-W4A16 --baseline Qwen/Qwen3-8B
        pipeline validate ./Qwen3-8B-W4A16
        pipeline push ./Qwen3-8B-W4A16 --to ORG/Qwen3-8B-W4A16
    """
    from ..commands.adopt import adopt

    quantization = adopt(checkpoint, baseline, baseline_revision=baseline_revision).quantization
    if as_json:
        summary = {
            key: quantization[key] for key in ("export", "formats", "bits_per_weight", "relative_error")
        }
        summary |= {"artifact": str(checkpoint), "quantized": len(quantization["modules"])}
        click.echo(json.dumps(summary))
        return
    formats = " and ".join(f"{each['modules']} × {each['label']}" for each in quantization["formats"])
    click.echo(
        f"{checkpoint}: adopted, {formats}, {quantization['bits_per_weight']:g} bits a weight, "
        f"relative error {quantization['relative_error']:.4f}\n  next: pipeline validate {checkpoint}"
    )
