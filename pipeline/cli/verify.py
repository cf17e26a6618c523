"""`pipeline verify`: prints what `verify` found and exits by it."""

import json

import click

MARKS = {"yes": "ok", "no": "FAIL", "unknown": "?"}


@click.command("verify")
@click.argument("model")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of MODEL, if it is a Hub id.")
@click.option(
    "--signers",
    metavar="FILE",
    help="File of allowed signers (ssh-keygen), one of whom must have signed the verdict.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def command(
    context: click.Context, model: str, revision: str | None, signers: str | None, as_json: bool
) -> None:
    """Check the digests, the verdict, the release policy and the signature of MODEL, a folder or a Hub id.

    The verdict is computed again from the raw figures that it holds. Nothing is measured again.

    Exit status: 0 every check passes, 1 a check fails, 2 a check cannot be decided or there is nothing to
    check.

    \b
    Examples:
        pipeline verify ORG/Qwen3-8B-INT4
        pipeline verify release/Qwen3-8B-INT4 --signers allowed_signers
    """
    from ..commands.verify import verify

    found = verify(model, revision, signers)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        for finding in found.findings:
            click.echo(f"{MARKS[finding.holds]:4} {finding.name:14} {finding.said}")
    context.exit(found.exit_status)
