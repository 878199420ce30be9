"""Who gives the command: a person, or a launcher that gives the same one again after a crash."""

from __future__ import annotations

import os


def gives_again() -> bool:
    """Whether the command must be start and restart in one, because a launcher cannot add --resume to it.

    torchrun starts its ranks again after one has failed (--max-restarts), and the whole torchrun command is given again
    after its job has ended. Slurm runs a requeued job from its beginning.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
