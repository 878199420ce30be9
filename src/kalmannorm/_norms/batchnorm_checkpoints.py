"""Fill in missing keys when a checkpoint of another norm is loaded, so that it loads with `strict=True`.

A BatchNorm checkpoint has no observed statistics. They start from its running statistics. A checkpoint of a Kalman
norm without a prior has no filter. The filter then keeps its initial values. So do the constants of a calibrated prior
and the state of a closing phase. A Kalman checkpoint without these constants was not calibrated. If only a part of the
statistics or of the filter is missing, the checkpoint is corrupted. Nothing is filled in, and torch raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from kalmannorm._norms.closing_state import SAVED

BATCHNORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
SOURCES = {"observed_mean": "running_mean", "observed_var": "running_var"}
CONSTANTS = {"prior_scale": 1.0, "prior_shift": 0.0}
"""The constants of a calibrated prior, and their values for a prior that is not calibrated."""
MANY = 1 << 40


def fill_from_batchnorm(norm: _NormBase, state_dict: dict[str, Any], prefix: str) -> None:
    """Add the keys that `norm` has and the saved norm did not have to `state_dict`, in place."""
    if not any(prefix + name in state_dict for name in BATCHNORM):
        return
    buffers = {name: buffer for name, buffer in norm.named_buffers() if name not in BATCHNORM}
    closing = norm._modules.get("closing")
    if closing is not None:
        buffers |= {f"closing.{name}": tensor for name, tensor in closing.saved().items()}  # type: ignore[operator]
    kept = buffers.keys() & ({f"closing.{name}" for name in SAVED} | CONSTANTS.keys())
    statistics = {name for name in buffers.keys() - kept if "." not in name}
    learned = {name: parameter.detach() for name, parameter in norm.named_parameters() if name not in BATCHNORM}
    running = [state_dict[prefix + name] for name in SOURCES.values() if prefix + name in state_dict]
    if len(running) == 2 and not any(prefix + name in state_dict for name in statistics):
        # The number of values is not known. With a momentum it only has to be large. Otherwise the next batch would
        # count as the first one and overwrite the loaded statistics.
        counts = {"values_tracked": 0 if norm.momentum is None else MANY, "skipped_batches": 0}
        for name in statistics:
            if name in counts:
                fill = torch.tensor(counts[name], dtype=torch.long, device=running[0].device)
            else:
                fill = state_dict[prefix + SOURCES[name]].clone()
            state_dict[prefix + name] = fill
        state_dict.update({prefix + name: buffers[name].clone() for name in kept if not buffers[name].is_meta})
    elif prefix + "gain_logit" in state_dict and not any(prefix + name in state_dict for name in CONSTANTS):
        state_dict.update({prefix + n: torch.full_like(buffers[n], CONSTANTS[n]) for n in kept & CONSTANTS.keys()})
    if not any(prefix + name in state_dict for name in learned):
        # Parameters on the meta device have no initial values. Their keys stay missing and are reported.
        state_dict.update({prefix + name: t.clone() for name, t in learned.items() if not t.is_meta})
