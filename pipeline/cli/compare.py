"""`pipeline compare`: parses options, calls `compare` and prints a table."""

import json

import click

from ...serving_check.settings import QUALITY_TOKENS


@click.command("compare")
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--baseline",
    metavar="MODEL",
    help="The unquantized checkpoint.  [default: the checkpoint that the first of MODELS was made from]",
)
@click.option("--text", metavar="FILE", help="Held-out text.  [default: the text that comes with Scalegate]")
@click.option(
    "--quality-tokens",
    type=click.IntRange(min=2),
    default=QUALITY_TOKENS,
    show_default=True,
    help="The most held-out tokens to measure quality on.",
)
@click.option(
    "--device", default="auto", show_default=True, help="Device to run on: auto, cpu, cuda or cuda:N."
)
@click.option(
    "--dtype", default="auto", show_default=True, help="Type of activations, the same for all models."
)
@click.option(
    "--card",
    is_flag=True,
    help="Save the comparison in the folder of the first of MODELS, whose model card then shows it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    models: tuple[str, ...],
    baseline: str | None,
    text: str | None,
    quality_tokens: int,
    device: str,
    dtype: str,
    card: bool,
    as_json: bool,
) -> None:
    """Compare the quality of quantized MODELS, folders or Hub ids, with one unquantized baseline.

    The table shows the Kullback-Leibler divergence of each next token's distribution from the baseline's, in
    nats.

    \b
    Examples:
        pipeline compare int4 nvfp4 ORG/Qwen3-8B-AWQ
        pipeline compare out --baseline Qwen/Qwen3-8B --text texts.jsonl --json
        pipeline compare out ORG/Qwen3-8B-AWQ --card
    """
    from ..commands.compare import compare

    found = compare(
        models, baseline, text=text, quality_tokens=quality_tokens, device=device, dtype=dtype, card=card
    )
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    baseline_nats = f"{found.baseline}: {found.baseline_nats_per_token:.4f} nats a token"
    click.echo(f"{found.tokens:,} tokens in {found.dtype}; {baseline_nats}\n")
    click.echo(found.table())
    for warning in found.warnings:
        click.echo(f"\n{warning}")
    click.echo("\nMedian relative error of the weights:\n")
    click.echo(found.module_table())
