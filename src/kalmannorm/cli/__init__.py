"""The command `kalmannorm`. Nothing heavy but torch is imported before a command needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script: users' mistakes end in one line on stderr and exit status 2, a Ctrl-C in one line and 130."""
    try:
        from kalmannorm.cli.app import run
    except ModuleNotFoundError as error:
        sys.exit(f"kalmannorm: {error.name} is missing; the command needs the lab: pip install 'kalmannorm[lab]'")
    except KeyboardInterrupt:
        print("kalmannorm: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(run())
