"""`pipeline doctor`: prints what `doctor` found, on one screen or, with `--verbose`, in full."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import click

from ...base.installed import NOT_INSTALLED
from ...base.log import is_verbose
from ...layouts.choosing.tried import MARKS
from ..commands.doctor import Device, Diagnosis, HubLogin, LayoutChoice, LayoutState, doctor

GB = 1e9
WIDTH = 80
LABEL = 13
"""Width of the label before each line's text, in characters."""
ON_SCREEN = ("torch", "triton", "transformers")


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(as_json: bool) -> None:
    """Show what this machine can run and what to install for the rest. Doctor sends no request.

    A table names the layout that serves each weight format on this machine. In the table, "1.83 (0.62)"
    means on average 1.83 times as fast as bf16, and 0.62 times at the worst shape and batch size. `pipeline
    layout` or `pipeline release` measured the speeds in the table on this machine. A format without a
    measured speed is marked "unmeasured". For experts, "per expert" means that the same layout multiplies one
    expert after another.

    A kernel marked † was only compiled for this GPU: the Scalegate developers never ran it on such a GPU. A
    kernel marked ‡ was compiled for this GPU and run on a newer GPU, which translated its code.

    --verbose adds all versions. For every layout, --verbose says how the kernel was tried and why the layout
    refuses a format. For every KV format, --verbose says how the kernels were tried.

    \b
    Examples:
        pipeline doctor
        pipeline doctor --verbose
        pipeline doctor --json
    """
    diagnosis = doctor()
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=False))
        return
    lines = [*_screen(diagnosis), *(_details(diagnosis) if is_verbose() else ())]
    click.echo("\n".join(lines))


def _screen(diagnosis: Diagnosis) -> Iterator[str]:
    versions = (f"{name} {diagnosis.versions[name] or NOT_INSTALLED}" for name in ON_SCREEN)
    yield ", ".join([f"Scalegate {diagnosis.versions['scalegate'] or NOT_INSTALLED}", *versions])
    for package in diagnosis.untested:
        yield f"not tested with {package}"
    groups = _alike(diagnosis.devices)
    for device in groups:
        yield from _labelled(device.kind, f"{device.name}: {device.detail}, {_memory(device)}")
    gpus = [device for device in groups if device.kind != "cpu"]
    for device in gpus or groups:
        yield ""
        yield from _weights(device, diagnosis.choices)
    yield from _labelled("KV formats", ", ".join(diagnosis.kv_formats))
    ready = [engine.name for engine in diagnosis.engines if engine.available]
    absent = [engine.name for engine in diagnosis.engines if not engine.available]
    more = f"; not here: {', '.join(absent)}" if absent else ""
    yield from _labelled("engines", f"{', '.join(ready)}{more}")
    disk = f"{diagnosis.disk_free_bytes / GB:.1f} GB free here"
    yield from _labelled("Hub, disk", f"{_login(diagnosis.hub)}; {disk}")
    if diagnosis.missing:
        yield from _labelled("to do more", f"{', '.join(diagnosis.missing)} (how: doctor --verbose)")


def _labelled(label: str, text: str) -> list[str]:
    first, others = f"{label:{LABEL - 1}} ", " " * LABEL
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _alike(devices: Sequence[Device]) -> list[Device]:
    """Devices of the same name as one device, `cuda:0,1`, with the least memory of any of them."""
    groups: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.name, device.detail), []).append(device)
    return [
        replace(
            group[0],
            kind=",".join([group[0].kind, *(device.kind.rpartition(":")[2] for device in group[1:])]),
            free_bytes=min(device.free_bytes for device in group),
        )
        for group in groups.values()
    ]


def _memory(device: Device) -> str:
    each = " each" if "," in device.kind else ""
    return f"{device.free_bytes / GB:.1f} of {device.memory_bytes / GB:.1f} GB free{each}"


def _weights(device: Device, choices: Iterable[LayoutChoice]) -> Iterator[str]:
    """A line for each weight format: the layout that serves it on `device`, its speed, and the layout for
    experts.
    """
    first = device.kind.partition(",")[0]
    here = [choice for choice in choices if choice.device == first]
    experts = {choice.problem: choice for choice in here if choice.experts}
    rows = [(f"weights on {device.kind}", "layout", "bf16 = 1.00", "layout of experts")]
    rows += [
        (choice.problem, _layout(choice), _speed(choice), _experts(experts[choice.problem], choice))
        for choice in here
        if not choice.experts
    ]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for row in rows:
        yield "".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
    notes = [f"{mark} {how}" for how, mark in MARKS.items() if how in {choice.tried for choice in here}]
    legend = ", ".join(notes)
    if not any(choice.shapes for choice in here):
        yield f"{legend}{'; ' if legend else 'to measure '}speeds: pipeline layout MODEL"
    elif legend:
        yield legend


def _layout(choice: LayoutChoice) -> str:
    return f"{choice.layout or 'none'}{MARKS.get(choice.tried, '')}"


def _speed(choice: LayoutChoice) -> str:
    """The mean and the lowest speed as text: `2.13 (0.98)`."""
    if choice.speed is None or choice.least_speed is None:
        return "slow" if choice.is_slow else "unmeasured"
    return f"{choice.speed:.2f} ({choice.least_speed:.2f})" if choice.shapes else f"{choice.speed:.2f}"


def _experts(choice: LayoutChoice, dense: LayoutChoice) -> str:
    """The layout, and its mean speed if it was measured: few models have experts."""
    # Imports torch, which `doctor` has needed before.
    from ...layouts.packing.per_expert import SUFFIX

    layout = "per expert" if choice.layout == f"{dense.layout}{SUFFIX}" else _layout(choice)
    if choice.shapes and choice.speed is not None:
        return f"{layout} {choice.speed:.2f}"
    return f"{layout} slow" if choice.is_slow else layout


def _login(hub: HubLogin) -> str:
    token = "a token" if hub.token else "no token"
    return f"{hub.endpoint}, {token}{', offline mode' if hub.offline else ''}"


def _details(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"\n{diagnosis.platform}"
    yield "\nVersions"
    for name, version in diagnosis.versions.items():
        yield f"  {name:16} {version or NOT_INSTALLED}"
    yield "\nLayouts"
    for device in dict.fromkeys(state.device for state in diagnosis.layouts):
        for name in dict.fromkeys(state.layout for state in diagnosis.layouts):
            states = [s for s in diagnosis.layouts if s.device == device and s.layout == name]
            yield f"  {device:8} {name:18} {_serves(states)}"
    if diagnosis.kv_tried:
        yield "\nKV formats"
    for device, tried in diagnosis.kv_tried.items():
        for how in dict.fromkeys(tried.values()):
            yield f"  {device:8} {how}: {', '.join(name for name in tried if tried[name] == how)}"
    yield "\nEngines"
    for engine in diagnosis.engines:
        yield f"  {engine.name:10} {'yes' if engine.available else 'no'}: {engine.detail}"
    yield f"\nConventions  {', '.join(diagnosis.conventions)}"
    yield f"States       {', '.join(diagnosis.state_formats)}"
    yield f"Hub cache    {diagnosis.cache_free_bytes / GB:.1f} GB free in {diagnosis.hub.cache}"
    if diagnosis.hub.token:
        yield "Hub token    `hf auth whoami` asks whether it is valid"
    if diagnosis.advice:
        yield "\nTo do more:"
        yield from (f"  - {line}" for line in diagnosis.advice)


def _serves(states: list[LayoutState]) -> str:
    """Reasons for refusing formats, each said once: `yes (run): INT4 g128; not NVFP4: reads INT4 only`."""
    served = [state.problem for state in states if state.refusal is None]
    reasons: dict[str, list[str]] = {}
    for state in states:
        if state.refusal is not None:
            reasons.setdefault(state.refusal, []).append(state.problem)
    if not served and len(reasons) == 1:
        return f"no: {next(iter(reasons))}"
    refused = [f"not {', '.join(problems)}: {reason}" for reason, problems in reasons.items()]
    how = next((f" ({state.tried})" for state in states if state.tried), "")
    return "; ".join([f"yes{how}: {', '.join(served)}"] * bool(served) + refused)
