"""Detects launchers that repeat the same command after a crash."""

from __future__ import annotations

import os


def repeats_commands() -> bool:
    """Whether a launcher may repeat this command. It cannot add --resume, so the command must resume by itself.

    torchrun restarts its ranks after one has failed (--max-restarts), and schedulers repeat the whole torchrun command.
    Slurm runs a requeued job from its beginning.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
