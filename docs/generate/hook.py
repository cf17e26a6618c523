"""mkdocs replaces `<!-- generated: NAME -->` in a page by what the code says, each time that it builds."""

import re
from typing import Any

from scalegate.docs.generate import command_line, python_api

GENERATED = {"command line": command_line.reference, "Python API": python_api.reference}
MARK = re.compile(r"<!-- generated: (.+?) -->")


def on_page_markdown(markdown: str, **context: Any) -> str:
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
