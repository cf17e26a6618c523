"""`pipeline inspect`: prints what `inspect` found."""

import json
from collections.abc import Iterator

import click

from ...layouts.choosing.plan import LayoutPlan
from ...serving_check.gate.policy import first_lines_of
from ..commands.inspect import Inspection, inspect
from ..report.kv_table import pays

SHOWN = 6
"""How many names are listed; further ones are only counted."""


@click.command("inspect")
@click.argument("model")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of MODEL, if it is a Hub id.")
@click.option(
    "--signers", metavar="FILE", help="File of allowed signers (ssh-keygen) to check the signature against."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(model: str, revision: str | None, signers: str | None, as_json: bool) -> None:
    """Show what MODEL is: formats, bits per weight, sizes, layout plan, verdict, and whether its bytes match.

    MODEL is a folder or a Hub id: an artifact of Scalegate, or a checkpoint in any convention that it reads.

    \b
    Examples:
        pipeline inspect work/Qwen3-8B-INT4
        pipeline inspect RedHatAI/Qwen3-8B-quantized.w4a16 --json
    """
    inspection = inspect(model, revision, signers)
    if as_json:
        click.echo(json.dumps(inspection.to_json(), indent=2, ensure_ascii=False))
    else:
        for label, text in _lines(inspection):
            click.echo(f"{label:12} {text}")


def _lines(shown: Inspection) -> Iterator[tuple[str, str]]:
    yield "model", shown.model + (f" at {shown.revision}" if shown.revision else "")
    yield "convention", shown.convention
    for summary in shown.formats:
        yield (
            "quantized",
            f"{summary.modules} modules, {summary.format}: {summary.bits_per_weight:.4f} bits per weight, "
            f"{summary.nbytes:,} bytes",
        )
    if not shown.formats:
        yield "quantized", "nothing"
    kept = ", ".join(shown.kept_modules[:SHOWN])
    more = f", and {len(shown.kept_modules) - SHOWN} more" if len(shown.kept_modules) > SHOWN else ""
    yield "kept", f"{len(shown.kept_modules)} matrices, {shown.kept_nbytes:,} bytes with norms: {kept}{more}"
    yield (
        "size",
        f"{shown.weight_nbytes:,} bytes in {shown.shards} {'shard' if shown.shards == 1 else 'shards'}",
    )
    yield "KV cache", shown.kv_cache
    if shown.state_bytes:
        yield "states", f"{shown.state_bytes:,} bytes of recurrent layers for each request, however long"
    if not shown.is_artifact:
        yield "records", "none: not an artifact of Scalegate's"
        return
    at = f" at {shown.source_revision}" if shown.source_revision else ""
    yield "made from", f"{shown.source}{at}, recipe {shown.recipe.get('name') or 'without a name'}"
    yield "made with", ", ".join(f"{name} {version}" for name, version in shown.versions.items())
    yield "bytes", "as recorded" if not shown.changed_files else "CHANGED since they were recorded:"
    for change in shown.changed_files:
        yield "", change
    yield from _plan_lines(shown)
    yield from _verdict_lines(shown)


def _plan_lines(shown: Inspection) -> Iterator[tuple[str, str]]:
    if shown.layout_plan is None:
        yield "layout plan", "none; `pipeline layout` makes one"
        return
    yield "layout plan", f"measured on {shown.layout_plan['device']}"
    for choice in shown.layout_plan["choices"]:
        yield "", f"{choice['shape']}: {choice['layout']} ({len(choice['modules'])} modules)"
    for sentence in pays(LayoutPlan.from_json(shown.layout_plan)):
        yield "", sentence


def _verdict_lines(shown: Inspection) -> Iterator[tuple[str, str]]:
    if shown.verdict is None:
        yield "verdict", shown.verdict_problem or "none; `pipeline validate` gives one"
        return
    problem = f", but it does not hold: {shown.verdict_problem}" if shown.verdict_problem else ""
    yield "verdict", f"{shown.verdict.status}{problem} ({shown.verdict.environment.device})"
    for line in first_lines_of(shown.verdict):
        yield "", line
    if shown.signature is not None:
        by = f" by {shown.signature.signer}" if shown.signature.signer else ""
        key = f", key {shown.signature.key}" if shown.signature.key else ""
        yield "signature", f"{shown.signature.state}{by}{key}"
    for check in shown.verdict.checks:
        yield "", f"{check.status:12} {check.name}: {check.measured} (bound {check.bound})"
