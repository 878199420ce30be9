"""Kernel tests run on the GPU or, in a process started for it, in Triton's interpreter: see `tests/test_triton.py`."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["*"]
