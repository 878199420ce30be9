"""What a mistaken command says: one line on stderr, nothing on stdout."""

from __future__ import annotations

from kalmannorm_command.app import run


def said(capsys, *arguments: str, status: int = 2) -> str:
    assert run(list(arguments)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kalmannorm: ") and err.count("\n") == 1, err
    return err
