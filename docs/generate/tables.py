"""Rewrites the tables that are committed in docs/, between their marks. A test compares them with the code.

python -P -m scalegate.docs.generate.tables
"""

import re
from collections.abc import Callable
from pathlib import Path

from scalegate.docs.generate import families, gpus

DOCS = Path(__file__).resolve().parents[1]
TABLES: dict[str, Callable[[], str]] = {"my-gpu.md": gpus.table, "my-model.md": families.table}
BLOCK = re.compile(r"(<!-- table: begin -->\n).*?(<!-- table: end -->)", re.DOTALL)


def with_table(page: str, table: str) -> str:
    """`page` with the table between its marks replaced."""
    made, count = BLOCK.subn(lambda block: f"{block[1]}{table}\n{block[2]}", page)
    if count != 1:
        raise ValueError(f"a page with a table has its marks once, not {count} times")
    return made


def main() -> None:
    for name, table in TABLES.items():
        path = DOCS / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
