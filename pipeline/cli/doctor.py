"""`pipeline doctor`: prints what `doctor` found."""

import json

import click

from ...base.installed import NOT_INSTALLED
from ..commands.doctor import Diagnosis, LayoutState, doctor
from ..machine.tested_stack import as_sentence

GB = 1e9


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(as_json: bool) -> None:
    """Say what this machine can do, and what to install for the rest. Sends no request.

    \b
    Examples:
        pipeline doctor
        pipeline doctor --json
    """
    diagnosis = doctor()
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=False))
    else:
        _print(diagnosis)


def _print(found: Diagnosis) -> None:
    click.echo(found.platform)
    click.echo("\nDevices")
    for device in found.devices:
        memory = f"{device.memory_bytes / GB:.1f} GB, {device.free_bytes / GB:.1f} GB free"
        click.echo(f"  {device.kind:8} {device.name}: {memory}, {device.detail}")
    click.echo("\nVersions")
    for name, version in found.versions.items():
        click.echo(f"  {name:16} {version or NOT_INSTALLED}")
    if found.untested:
        click.echo(f"  Scalegate was {as_sentence(found.untested)}.")
    click.echo("\nLayouts")
    for device_kind in dict.fromkeys(state.device for state in found.layouts):
        for name in dict.fromkeys(state.layout for state in found.layouts):
            states = [s for s in found.layouts if s.device == device_kind and s.layout == name]
            click.echo(f"  {device_kind:8} {name:18} {_serves(states)}")
    click.echo("\nEngines")
    for engine in found.engines:
        click.echo(f"  {engine.name:10} {'yes' if engine.available else 'no'}: {engine.detail}")
    click.echo(f"\nKV formats   {', '.join(found.kv_formats)}")
    click.echo(f"Conventions  {', '.join(found.conventions)}")
    hub = found.hub
    login = "a token is there (`hf auth whoami` asks whether it is valid)" if hub.token else "no token"
    click.echo(f"\nHub {hub.endpoint}: {login}{', offline mode' if hub.offline else ''}")
    click.echo(
        f"Disk: {found.disk_free_bytes / GB:.1f} GB free here, "
        f"{found.cache_free_bytes / GB:.1f} GB in the Hub cache ({hub.cache})"
    )
    if found.advice:
        click.echo("\nTo do more:")
        for line in found.advice:
            click.echo(f"  - {line}")


def _serves(states: list[LayoutState]) -> str:
    """`INT4 g128; not NVFP4: reads INT4 only`, reasons that repeat said once."""
    served = [state.problem for state in states if state.refusal is None]
    reasons: dict[str, list[str]] = {}
    for state in states:
        if state.refusal is not None:
            reasons.setdefault(state.refusal, []).append(state.problem)
    if not served and len(reasons) == 1:
        return f"no: {next(iter(reasons))}"
    refused = [f"not {', '.join(problems)}: {reason}" for reason, problems in reasons.items()]
    return "; ".join([f"yes: {', '.join(served)}"] * bool(served) + refused)
