"""`pipeline push`: parses options, calls `push` and prints what it did or would do."""

import json

import click

from ..publishing.push_result import PushResult


@click.command("push")
@click.argument("artifact")
@click.option("--to", required=True, metavar="ORG/NAME|folder:DIR", help="A Hub repository, or a folder.")
@click.option("--private", is_flag=True, help="Keep a repository that this push creates private.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to main.")
@click.option(
    "--to-revision",
    "--revision",
    "revision",
    metavar="BRANCH",
    help="Commit to this branch, which is created if it does not exist.",
)
@click.option(
    "--allow-unjudged-speed",
    is_flag=True,
    help="Publish even if speed was emulated and therefore not judged; the model card then begins with "
    '"Speed was not judged".',
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show every operation, the gate's answer and the model card, and send nothing. Needs no token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    artifact: str,
    to: str,
    private: bool,
    create_pr: bool,
    revision: str | None,
    allow_unjudged_speed: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish ARTIFACT in one atomic commit, read the commit back, and only then make it public.

    ARTIFACT needs a passing verdict of `pipeline validate` on exactly its bytes, and the verdict must have
    judged speed. If the push is interrupted, run the same command again; files that the Hub already has are
    not sent again. An existing repository keeps its visibility.

    \b
    Examples:
        pipeline push work/Qwen3-8B-INT4 --to ORG/Qwen3-8B-INT4 --dry-run
        pipeline push work/Qwen3-8B-INT4 --to ORG/Qwen3-8B-INT4 --private
        pipeline push work/Qwen3-8B-INT4 --to folder:release/Qwen3-8B-INT4
    """
    from ..commands.push import push

    result = push(
        artifact,
        to,
        private=private,
        create_pr=create_pr,
        revision=revision,
        allow_unjudged_speed=allow_unjudged_speed,
        dry_run=dry_run,
    )
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        print_result(result, dry_run)


def print_result(result: PushResult, dry_run: bool = False) -> None:
    if dry_run:
        click.echo(f"This would be done to {result.target}; nothing was:")
        for operation in result.operations:
            size = "" if operation.size is None else f"{operation.size:,}"
            click.echo(f"  {operation.action:8} {size:>16}  {operation.sha256 or '':64}  {operation.subject}")
        click.echo(f"The gate: {result.gate}")
        click.echo(f"The card:\n\n{result.card}")
    elif result.status == "unchanged":
        click.echo(f"{result.url} holds exactly this release already; nothing was sent.")
    else:
        sent = [operation for operation in result.operations if operation.action in ("add", "replace")]
        total = sum(operation.size or 0 for operation in sent)
        visible = {True: " It is private.", False: " It is public.", None: ""}[result.private]
        click.echo(
            f"Published {len(sent)} files ({total:,} bytes) at {result.url}, and read them back.{visible}"
        )
    if result.commit and not dry_run:
        click.echo(f"Commit {result.commit}")
    for note in result.notes:
        click.echo(f"Note: {note}.")
