"""Typing errors in one line: the mistake, the most similar option, and the help to read."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence

import typer

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""click's class. typer uses its own copy of click, or the package, depending on its version."""
LONGEST = 4096
"""Characters per word. No path is longer."""
SYNONYMS = {
    "--batch-size": "--setting",
    "--settings": "--setting",
    "--output": "--out",
    "--root": "--data-root",
}
"""Options of other programs and of earlier versions, and what they are called here."""


class RefusedError(Exception):
    """A word on the command line that no option takes. The message is shown as one line."""


def check_words(words: Sequence[str]) -> None:
    """Raise for empty or very long words and for characters that cannot be printed. They would fail far from here."""
    for before, word in zip(["", *words], words, strict=False):
        attached = re.match(r"--?[\w-]+=", word)
        value = word[attached.end() :] if attached else word
        option = attached[0][:-1] if attached else before if before.startswith("-") else ""
        fault = _fault(value)
        if fault:
            raise RefusedError(f"{option or 'an argument'} {fault}")


def _fault(word: str) -> str | None:
    if not word:
        return "is empty: leave it out, or give it a value"
    if len(word) > LONGEST:
        return f"has {len(word):,} characters, but at most {LONGEST:,} are allowed"
    kinds = {unicodedata.category(letter) for letter in word}
    if "Cs" in kinds:
        return f"is not UTF-8: {word!a}"
    if "Cc" in kinds:
        return f"contains a control character: {word!a}"
    return None


def with_option(text: str, words: Sequence[str]) -> str:
    """The message with the option in front, as it was typed, if the message quotes a value of exactly one option.

    The library does not know how an option was spelled: -s or --setting, --method or --methods.
    """
    quoted = set(re.findall(r"'([^']+)'", text.partition("did you mean")[0]))
    quoted |= {f"{a},{b}" for a, b in re.findall(r"setting \((\d+), (\d+)\)", text)}
    typed = [option for option, value in _given(words) if {value, *value.split(",")} & quoted]
    return f"{typed[0]}: {text}" if len(set(typed)) == 1 and typed[0] not in text else text


def _given(words: Sequence[str]) -> list[tuple[str, str]]:
    """Options and their values: `--option value`, `--option=value`, `-o value` and `-ovalue`."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        attached = re.match(r"(--[\w-]+)=(.*)|(-\w)(.+)", word) if word.startswith("-") else None
        if attached and (attached[1] or not word.startswith("--")):
            found.append((attached[1] or attached[3], attached[2] if attached[1] else attached[4].removeprefix("=")))
        elif before.startswith("-") and not word.startswith("-"):
            found.append((before, word))
    return found


def line(error: Exception) -> str:
    """One line about a usage error; "" if the help was shown instead."""
    context = getattr(error, "ctx", None)
    where = f" See {context.command_path} --help" if context is not None else ""
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):  # only the error "no such option" has both
        return f"unknown option {option}{_meant(option, context)}{where}"
    text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    end = "" if text.endswith((".", "?")) else "."
    return f"{text[:1].lower()}{text[1:]}{end}{where}" if text else ""


def _meant(option: str, context: typer.Context | None) -> str:
    parameters = context.command.params if context is not None else []
    known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    synonym = SYNONYMS.get(option)
    close = [synonym] if synonym in known else _nearest(option, [name for name in known if name.startswith("--")])
    return f": did you mean {' or '.join(map(str, close))}?" if close else "."


def _nearest(given: str, known: Iterable[str]) -> list[str]:
    """At most two known options: those that `given` abbreviates (--lr, --dat), or else similar spellings."""
    names, word = sorted(known), given.lstrip("-")
    parts = {name: name.lstrip("-").split("-") for name in names}
    initials = [name for name in names if len(word) > 1 and "".join(part[:1] for part in parts[name]) == word]
    begun = [name for name in names if len(word) > 1 and name.lstrip("-").startswith(word)]
    return (initials or begun or difflib.get_close_matches(given, names, 2))[:2]
