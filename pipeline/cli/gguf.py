"""`pipeline gguf`: parses options, calls `gguf` and prints the result."""

from pathlib import Path

import click


@click.command("gguf")
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write.")
@click.option(
    "--matrices",
    metavar="KIND",
    default="bf16",
    show_default=True,
    help="Type of the matrices that are not IQ2_XXS: bf16 or q8_0.",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of MODEL, if it is a Hub id.")
def command(model: str, out: Path, matrices: str, revision: str | None) -> None:
    """Write MODEL, an artifact or a checkpoint, as one GGUF file for llama.cpp.

    IQ2_XXS weights are copied bit for bit, and symmetric INT4 in groups of 32 becomes Q4_0. Matrices in other
    formats are written as BF16, or rounded to Q8_0. For Q4_K and other K-quants, write BF16 and run
    llama.cpp's llama-quantize on the file. MODEL can be a Llama, Mistral, Qwen2 or Qwen3 model.

    \b
    Examples:
        pipeline quantize Qwen/Qwen3-8B --recipe iq2-xxs --out qwen3-8b-iq2
        pipeline gguf qwen3-8b-iq2 --out qwen3-8b-iq2_xxs.gguf
        pipeline gguf Qwen/Qwen3-8B --matrices q8_0 --out qwen3-8b-q8_0.gguf
    """
    from ..commands.gguf import gguf

    written = gguf(model, out, matrices=matrices, revision=revision)
    kinds = ", ".join(f"{count} × {kind}" for kind, count in written.tensors.items())
    click.echo(f"{written.path}: {kinds}, {written.path.stat().st_size / 1e6:,.1f} MB")
    if written.without_tokenizer is not None:
        click.echo(f"  without the tokenizer: {written.without_tokenizer}")
