"""`pipeline serve`: parses options and calls `serve`."""

from typing import Literal

import click


@click.command("serve")
@click.argument("artifact")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--api-key", envvar="SCALEGATE_API_KEY", help="Key that /v1 asks for; none asks for nothing.")
@click.option("--served-model-name", metavar="NAME", help="What clients call the model; default ARTIFACT.")
@click.option("--revision", help="Branch, tag or commit, where ARTIFACT is a Hub id.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Of activations and unquantized weights; auto is the checkpoint's own.",
)
@click.option("--layout", metavar="NAME", help="One layout for every quantized layer, instead of the plan.")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="The most requests that decode together.",
)
@click.option(
    "--max-model-len", type=click.IntRange(min=2), help="Prompt plus output, in tokens; default the model's."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "unquantized", "fp8", "int8_per_token_head"]),
    default="auto",
    show_default=True,
    help="How keys and values are stored; auto is what the checkpoint declares.",
)
@click.option(
    "--kv-cache-tokens", type=click.IntRange(min=1), help="Tokens the KV pool holds; default what fits."
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    help="Prompt tokens computed in one step; default 512, on a GPU 4096 and 256 while others decode.",
)
@click.option(
    "--jit-monitor",
    type=click.Choice(["off", "warn", "error"]),
    default="warn",
    show_default=True,
    help="When something compiles after warm-up: log and count it, or end the server.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="On SIGTERM, how long running requests may take to finish.",
)
def command(
    artifact: str,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    revision: str | None,
    device: str,
    dtype: str,
    layout: str | None,
    max_num_seqs: int,
    max_model_len: int | None,
    kv_cache_dtype: str,
    kv_cache_tokens: int | None,
    prefill_chunk: int | None,
    jit_monitor: Literal["off", "warn", "error"],
    drain_seconds: float,
) -> None:
    """Serve ARTIFACT, a folder or a Hub id, over an OpenAI-compatible HTTP API.

    Prints one line when it serves. SIGTERM or Ctrl-C stops taking requests, finishes those that run, and
    ends.

    \b
    Examples:
        pipeline serve examples/qwen3-pycode-5m
        pipeline serve work/Qwen3-8B-INT4 --port 0 --max-num-seqs 64
        pipeline serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key "$KEY"
    """
    from ..serve import serve

    serve(
        artifact,
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        device=device,
        dtype=dtype,
        layout=layout,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_tokens=kv_cache_tokens,
        prefill_chunk=prefill_chunk,
        jit_monitor=jit_monitor,
        revision=revision,
        drain_seconds=drain_seconds,
    )
