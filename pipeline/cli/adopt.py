"""`pipeline adopt`: options in, `pipeline.adopt.adopt` called, a summary out."""

import json
from pathlib import Path

import click


@click.command("adopt")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--baseline", required=True, help="The unquantized checkpoint: a folder or a Hub id.")
@click.option("--baseline-revision", metavar="REV", help="Branch, tag or commit, where BASELINE is a Hub id.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(checkpoint: Path, baseline: str, baseline_revision: str | None, as_json: bool) -> None:
    """Write the manifest of CHECKPOINT, a folder that another tool quantized.

    Each quantized module is measured against the baseline. `validate`, `push` and `verify` then work on it as
    on an artifact of Scalegate's own.

    \b
    Examples:
        pipeline adopt ./Qwen3-8B-W4A16 --baseline Qwen/Qwen3-8B
        pipeline validate ./Qwen3-8B-W4A16
        pipeline push ./Qwen3-8B-W4A16 --to ORG/Qwen3-8B-W4A16
    """
    from ..commands.adopt import adopt

    found = adopt(checkpoint, baseline, baseline_revision=baseline_revision).quantization
    if as_json:
        summary = {key: found[key] for key in ("export", "formats", "bits_per_weight", "relative_error")}
        click.echo(json.dumps(summary | {"artifact": str(checkpoint), "quantized": len(found["modules"])}))
        return
    formats = " and ".join(f"{one['modules']} × {one['label']}" for one in found["formats"])
    click.echo(
        f"{checkpoint}: adopted, {formats}, {found['bits_per_weight']:g} bits a weight, relative error "
        f"{found['relative_error']:.4f}\n  next: pipeline validate {checkpoint}"
    )
