"""`pipeline sign`: parses options and calls `sign`."""

import click


@click.command("sign")
@click.argument("artifact")
@click.option(
    "--key",
    required=True,
    metavar="FILE",
    help="SSH key to sign with. If the file holds a public key, ssh-agent signs.",
)
def command(artifact: str, key: str) -> None:
    """Sign the verdict in ARTIFACT with an SSH key, so that others can tell who made the verdict.

    The signature covers the verdict, and through the verdict's digests every other file of the release.

    \b
    Examples:
        pipeline sign work/Qwen3-8B-INT4 --key ~/.ssh/id_ed25519
    """
    from ..commands.sign import sign

    signature = sign(artifact, key)
    click.echo(f"Signed with key {signature.key}")
