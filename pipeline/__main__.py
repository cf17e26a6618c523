"""`python -m scalegate.pipeline`: the same as the `pipeline` command."""

from .cli.main import main

main(prog_name="pipeline")
