"""`pipeline validate`: parses options, calls `validate`, prints the verdict and exits by it."""

import json
import sys
from typing import Any

import click

from ...serving_check.adapters.all_engines import DEFAULT_ENGINE
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import SIZED, EngineOptions
from ...serving_check.settings import Bounds, WorkloadSettings
from ..validation.options import ValidateOptions
from .exit_status import INTERRUPTED
from .options import options_from


@click.command("validate")
@click.argument("artifact")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of ARTIFACT, if it is a Hub id.")
@options_from(ValidateOptions, WorkloadSettings, Bounds)
@click.option(
    "--report", metavar="DIR", help="Folder that the verdict, an HTML page and the plots are also written to."
)
@options_from(EngineOptions, Placement, sized=SIZED)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.pass_context
def command(context: click.Context, artifact: str, as_json: bool, **options: Any) -> None:
    """Serve ARTIFACT beside its baseline at every M, check it, and give a verdict.

    ARTIFACT is a folder or a Hub id, quantized by Scalegate, compressed-tensors, ModelOpt or torchao, or not
    quantized at all. If Scalegate made ARTIFACT, the verdict is written into ARTIFACT's folder
    (serving_check.json and serving_check/). --report writes the verdict into another folder.

    The engine's options, from --device on, apply to both servers. --layout, --kv-cache-dtype and
    --batch-invariance apply to ARTIFACT alone, and a run with one of them keeps the verdict in ARTIFACT's
    folder as it was. Servers that do not fit on the GPU together take turns. To give each server GPUs of its
    own, name twice as many in --devices as one server needs.

    Exit status: 0 pass, 1 fail, 2 inconclusive or unusable input, 70 a fault of
    Scalegate or the machine, 130 interrupted.

    \b
    Examples:
        pipeline validate work/Qwen3-8B-INT4
        pipeline validate ORG/Qwen3-8B-AWQ --baseline Qwen/Qwen3-8B --report report
        pipeline validate work/Qwen3-8B-nvfp4 --rival work/Qwen3-8B-iq2-xxs
        pipeline validate work/Qwen3-8B-INT4 --tasks arc_easy,wikitext
        pipeline validate work/Qwen3-8B-INT4 --m 1,8,64,128 --input-len 512 --output-len 128
        pipeline validate Qwen/Qwen3-8B --baseline Qwen/Qwen3-8B --kv-cache-dtype fp8 --report fp8-kv
        pipeline validate work/Qwen3-8B-INT4 --engine vllm --m 1,8,32
        pipeline validate work/Llama-70B-INT4 --engine vllm --tensor-parallel-size 2 --devices 0,1,2,3
        pipeline validate work/Qwen3-8B-INT4 --engine http://127.0.0.1:8000 --baseline-engine http://127.0.0.1:8001
    """
    from .forked_servers import servers_forked

    try:
        with servers_forked(options["engine"] or DEFAULT_ENGINE, options["device"]):
            from ..commands.validate import validate
            from ..report.table import verdict_table

            verdict = validate(artifact, **options)
    except KeyboardInterrupt:
        click.echo("Interrupted; both servers are stopped, nothing was decided.", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
    else:
        click.echo(verdict_table(verdict))
    context.exit(verdict.exit_status)
