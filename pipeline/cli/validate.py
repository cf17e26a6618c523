"""`pipeline validate`: parses options, calls `validate`, prints the verdict and exits by it."""

import json
import sys
from typing import Any

import click

from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import SIZED
from .engine_options import EngineWord, engine_options
from .exit_status import INTERRUPTED


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


@click.command("validate")
@click.argument("artifact")
@click.option(
    "--baseline", metavar="MODEL", help="What to compare with; default what ARTIFACT was made from."
)
@click.option(
    "--m",
    type=WholeNumbers(),
    help="Requests at once; default 1,2,4,8,16,32, and 1,8,32 for prompts of more than 1,024 tokens.",
)
@click.option("--report", metavar="DIR", help="Also write the verdict, an HTML page and the plots here.")
@click.option(
    "--engine",
    type=EngineWord(),
    default="embedded",
    show_default=True,
    help="URL: that of a running server.",
)
@click.option("--baseline-engine", type=EngineWord(), help="The same for the baseline; default as --engine.")
@click.option(
    "--input-len",
    type=int,
    help="Prompt tokens a request. [default: 64; of KVarN so many that codes are read and a page is written]",
)
@click.option("--output-len", default=64, show_default=True, help="Output tokens a request.")
@click.option("--waves", default=1, show_default=True, help="Requests each client sends in one repeat.")
@click.option(
    "--max-repeats",
    default=96,
    show_default=True,
    help="Blocks of two interleaved repeats at one M before giving up undecided.",
)
@click.option(
    "--warmups", default=1, show_default=True, help="Shorter repeats at each M first, on each side."
)
@click.option("--seed", type=int, help="Of the prompts; default a fresh one, which the verdict records.")
@click.option("--floor", type=click.FloatRange(min=0, min_open=True), help="Least throughput ratio.")
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
@click.option("--revision", help="Of ARTIFACT, where it is a Hub id.")
@click.option("--baseline-revision", help="Of the baseline, where it is a Hub id.")
@click.option("--rival", metavar="MODEL", help="A checkpoint that ARTIFACT must be faster than.")
@click.option("--rival-revision", help="Of the rival, where it is a Hub id.")
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
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.pass_context
def command(
    context: click.Context, artifact: str, baseline: str | None, as_json: bool, **options: Any
) -> None:
    """Serve ARTIFACT beside its baseline at every M, check it, and give a verdict.

    ARTIFACT is a folder or a Hub id: one of Scalegate's, or any compressed-tensors, ModelOpt, torchao or
    plain checkpoint. The verdict goes into ARTIFACT (serving_check.json and serving_check/), where that is
    Scalegate's, and into --report.

    Both servers get the engine's options, from --device on; --layout and --kv-cache-dtype are for ARTIFACT
    alone, to try them: its verdict then stays as it was. Servers that do not fit on the GPU together take
    turns; with twice the GPUs that a server needs in --devices, each has its own.

    Exit status: 0 pass, 1 fail, 2 inconclusive or unusable input, 70 a fault of
    Scalegate or the machine, 130 interrupted.

    \b
    Examples:
        pipeline validate work/Qwen3-8B-INT4
        pipeline validate ORG/Qwen3-8B-AWQ --baseline Qwen/Qwen3-8B --report report
        pipeline validate work/Qwen3-8B-nvfp4 --rival work/Qwen3-8B-iq2-xxs
        pipeline validate work/Qwen3-8B-INT4 --eval arc_easy,wikitext
        pipeline validate work/Qwen3-8B-INT4 --m 1,8,64,128 --input-len 512 --output-len 128
        pipeline validate Qwen/Qwen3-8B --baseline Qwen/Qwen3-8B --kv-cache-dtype fp8 --report fp8-kv
        pipeline validate work/Qwen3-8B-INT4 --engine vllm --m 1,8,32
        pipeline validate work/Llama-70B-INT4 --engine vllm --tensor-parallel-size 2 --devices 0,1,2,3
        pipeline validate work/Qwen3-8B-INT4 --engine http://127.0.0.1:8000 --baseline-engine http://127.0.0.1:8001
    """
    from ..machine.forked_servers import servers_forked

    try:
        with servers_forked(options["engine"], options["device"]):
            from ..commands.validate import validate
            from ..report.table import verdict_table

            verdict = validate(artifact, baseline, **options)
    except KeyboardInterrupt:
        click.echo("Interrupted; both servers are stopped, nothing was decided.", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
    else:
        click.echo(verdict_table(verdict))
    context.exit(verdict.exit_status)
