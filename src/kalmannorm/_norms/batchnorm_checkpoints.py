"""What the checkpoint of another norm lacks, filled in so that it loads with `strict=True`.

A BatchNorm's lacks what only these layers have: the observation starts from its statistics. A norm of ours without a
prior lacks the filter, which then stays at its start. What lacks only a part of the statistics or of the filter is
damaged, and is left to be refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

BATCHNORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
SOURCES = {"observed_mean": "running_mean", "observed_var": "running_var"}
MANY = 1 << 40


def fill_from_batchnorm(norm: _NormBase, state_dict: dict[str, Any], prefix: str) -> None:
    """Add to `state_dict`, in place, what `norm` has and the norm that was saved had not."""
    if not any(prefix + name in state_dict for name in BATCHNORM):
        return
    statistics = {name for name, _ in norm.named_buffers() if name not in BATCHNORM}
    learned = {name: parameter.detach() for name, parameter in norm.named_parameters() if name not in BATCHNORM}
    running = [state_dict[prefix + name] for name in SOURCES.values() if prefix + name in state_dict]
    if len(running) == 2 and not any(prefix + name in state_dict for name in statistics):
        # How many values went in is not known; with a momentum it only has to be many, lest the next batch count
        # as the first and wipe out what was loaded.
        counts = {"values_tracked": 0 if norm.momentum is None else MANY, "skipped_batches": 0}
        for name in statistics:
            if name in counts:
                fill = torch.tensor(counts[name], dtype=torch.long, device=running[0].device)
            else:
                fill = state_dict[prefix + SOURCES[name]].clone()
            state_dict[prefix + name] = fill
    if not any(prefix + name in state_dict for name in learned):
        # On the meta device there is no start to keep: the keys stay missing and are reported.
        state_dict.update({prefix + name: t.clone() for name, t in learned.items() if not t.is_meta})
