"""Text that is safe to print: messages may quote scripts."""

from __future__ import annotations

MOST = 2_000
"""Maximum number of characters of one message."""


def printable(text: str, keep: str = "") -> str:
    """The text with non-printable characters escaped, except those in `keep`."""
    if len(text) > MOST and not keep:
        text = text[:MOST] + " ..."
    if text.isprintable():
        return text
    return "".join(
        (
            char
            if char.isprintable() or char in keep
            else f"\\x{ord(char):02x}"
            if ord(char) < 256
            else f"\\u{ord(char):04x}"
        )
        for char in text
    )
