"""`pipeline layout`: parses options, calls `layout` and prints the table."""

import json

import click

from ...base.errors import UserError
from ...base.log import is_verbose, logger
from ...serving_check.engine.options import DTYPES


class WholeNumbers(click.ParamType):
    """`1,2,4` as a tuple of whole numbers."""

    name = "M,M,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            return tuple(int(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4,8", param, ctx)


@click.command("layout")
@click.argument("artifact")
@click.option(
    "--m", type=WholeNumbers(), help="Batch sizes to measure.  [default: 1,2,4,8,16,32; on CUDA also 64,128]"
)
@click.option("--layout", "force", metavar="NAME", help="Record this layout, even if another is faster.")
@click.option(
    "--device", default="auto", show_default=True, help="Device to run on: auto, cpu, cuda or cuda:N."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Type of activations; auto means the checkpoint's own type.",
)
@click.option("--kv/--no-kv", default=True, show_default=True, help="Measure the KV formats as well.")
@click.option(
    "--contexts",
    type=WholeNumbers(),
    metavar="N,N,...",
    help="Context lengths to measure KV formats at, in tokens.  [default: 128,1024,4096; on CUDA also 16384]",
)
@click.option("--fresh", is_flag=True, help="Measure again instead of reading cached measurements.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of ARTIFACT, if it is a Hub id.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    artifact: str,
    m: tuple[int, ...] | None,
    force: str | None,
    device: str,
    dtype: str,
    kv: bool,
    contexts: tuple[int, ...] | None,
    fresh: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Measure every packing layout for ARTIFACT's layers at every M, and record the fastest as a layout plan.

    M is the batch size. Each layout is compared with the unquantized product on each distinct layer shape, at
    every M. Each KV format is compared with unquantized keys and values, at every M and several context
    lengths. The layout plan is written into ARTIFACT's scalegate.json, where `pipeline serve` and `pipeline
    validate` read it. With --verbose, the table also names the layouts for other formats, devices and kinds
    of layers. Measurements are cached in ~/.cache/scalegate; set SCALEGATE_CACHE to use another
    directory.

    \b
    Examples:
        pipeline layout work/Qwen3-8B-INT4
        pipeline layout work/Qwen3-8B-INT4 --m 1,8,64,256 --fresh
        pipeline layout work/Qwen3-8B-INT4 --contexts 512,8192
        pipeline layout work/Qwen3-8B-INT4 --layout tinygemm
        pipeline layout ORG/Qwen3-8B-AWQ --json
    """
    if contexts and not kv:
        raise UserError("--contexts times KV formats, and --no-kv times none; leave one of the two out")
    from ..commands.layout import layout
    from ..report.kv_table import kv_table, pays
    from ..report.layout_table import layout_table

    result = layout(
        artifact,
        ms=m,
        force=force,
        device=device,
        dtype=dtype,
        fresh=fresh,
        kv=kv,
        contexts=contexts,
        revision=revision,
    )
    if as_json:
        more = {
            "stored": result.stored,
            "kv_pays": pays(result.plan),
            "tried": result.tried,
            "kv_tried": result.kv_tried,
        }
        click.echo(json.dumps(result.plan.to_json() | more, indent=2))
        logger.info(result.note)
    else:
        weights = layout_table(result.plan, result.tried, is_verbose()) if result.plan.choices else ""
        click.echo("\n\n".join(filter(None, (weights, kv_table(result.plan, result.kv_tried)))))
        click.echo(f"\n{result.note}")
