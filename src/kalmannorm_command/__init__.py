"""The command `kalmannorm`: one file per subcommand, in a package beside the library.

`import kalmannorm` imports torch, which takes seconds. A module `kalmannorm.x` cannot avoid that, because Python
imports the package first. This package imports the library only after typer has parsed the command line. Therefore
`--help`, `--version` and typing errors answer at once.

The library itself does not import lazily. Whoever writes `import kalmannorm` needs torch anyway. An eager import also
registers the custom ops, which a program saved by `torch.export` in training mode looks up when it is loaded.
"""

from __future__ import annotations

import sys

from kalmannorm_command.interrupts import ending_at_once
from kalmannorm_command.version import versions


def main() -> None:
    """Run the command line. A user's mistake ends in one line and status 2, a Ctrl-C in one line and status 130."""
    if sys.argv[1:] == ["--version"]:  # it needs no package of the lab
        print(versions())
        sys.exit()
    try:
        with ending_at_once():
            from kalmannorm_command.app import run
    except ModuleNotFoundError as error:
        sys.exit(f"kalmannorm: {error.name} is missing. The command needs the lab: pip install 'kalmannorm[lab]'")
    sys.exit(run())
