"""HTML from Python. Everything that is not markup is escaped, so that no record can inject HTML into the page."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def text(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(str(value), quote=True))


def joined(*parts: object) -> Markup:
    return Markup("".join(text(part) for part in parts if part is not None))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """`class_` is class and `data_value` is data-value.

    None and False omit an attribute, True writes it without value.
    """
    written = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            word = key.rstrip("_").replace("_", "-")
            written.append(f" {word}" if value is True else f' {word}="{escape(str(value), quote=True)}"')
    return Markup(f"<{name}{''.join(written)}>{joined(*children)}</{name}>")
