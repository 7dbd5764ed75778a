"""This module makes text of files safe to print to a terminal; ``mindnlp-dp status`` and ``report`` call it."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Return ``str(text)`` with control characters, line breaks and lone surrogates as escapes.

    A terminal obeys control characters: they can hide lines, change its title, or type into it.

    >>> printable("rank 1\x1b[2J\n")
    'rank 1\\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
