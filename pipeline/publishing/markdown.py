"""Text from a checkpoint, a recipe or a record for a card: plain, with all markup escaped.

Front matter is dumped as YAML instead.
"""

import re

MARKUP = re.compile(
    r"[\\`*\[\]|~$]"  # code, emphasis, links, tables, mathematics
    r"|(?<!\w)_|_(?!\w)"  # emphasis; an underscore inside a word is none
)
HTML = (
    (re.compile(r"&(?=#?\w+;)"), "&amp;"),
    (re.compile(r"<(?=[A-Za-z/!?])"), "&lt;"),
    (re.compile(r":(?=//)"), "&#58;"),
    (re.compile(r"\b(www)\.", re.IGNORECASE), r"\1&#46;"),
)
MAX_TEXT = 2000


def plain(text: object) -> str:
    """Return `text` on one line, to be read as it is: markup escaped, addresses not turned into links."""
    line = MARKUP.sub(lambda match: "\\" + match[0], _one_line(text))
    for pattern, instead in HTML:
        line = pattern.sub(instead, line)
    return line


def code(text: object) -> str:
    """Return `text` for use between two backticks."""
    return _one_line(text).replace("`", "'")


def fence(*texts: str) -> str:
    """Return backticks around a block of code, more than any of `texts` has in a row."""
    longest = max((len(run) for text in texts for run in re.findall(r"`+", text)), default=0)
    return "`" * max(3, longest + 1)


def _one_line(text: object) -> str:
    line = " ".join(str(text).split())
    return "".join(letter for letter in line if letter.isprintable())[:MAX_TEXT]
