"""The closing phase by its definition: value by value, in float64."""

from __future__ import annotations

import torch
from torch import nn

F64 = torch.float64


def at(strength: float, norm: nn.Module, seed: int = 3) -> None:
    """Put a norm into its closing phase, with some state."""
    rng = torch.Generator().manual_seed(seed)
    norm.begin_closing()
    norm.closing.strength.fill_(strength)
    norm.closing.averages.copy_(torch.randn(norm.num_features, 3, generator=rng))
    norm.running_mean.copy_(0.5 * torch.randn(norm.num_features, generator=rng))
    norm.running_var.copy_(1 + torch.rand(norm.num_features, generator=rng))


def by_definition(norm, x, g, prior, strength):
    """Output and gradients, group by group, in the words of `_norms/closing.py`."""
    m, eps, values = norm.statistics_batch_size, norm.eps, x.numel() // x.shape[1]
    q = torch.ones((), dtype=F64) if prior is None else norm.gain.detach().squeeze()
    expected_g, expected_gz = norm.closing.averages.t()[:2] / values
    s = (norm.running_var + eps).sqrt()
    y, dx = torch.empty_like(x), torch.empty_like(x)
    d_gain, d_prior = torch.zeros((), dtype=F64), [torch.zeros(norm.num_features, dtype=F64) for _ in range(2)]
    sums = [torch.zeros(norm.num_features, dtype=F64) for _ in range(2)]
    for start in range(0, len(x), m):
        for c in range(norm.num_features):
            part, slope = x[start : start + m, c], g[start : start + m, c]
            seen, spread, count = part.mean(), part.var(correction=0), part.numel()
            p_mean, p_var = (seen, spread) if prior is None else (prior[0][c], prior[1][c])
            off = seen - p_mean
            mean = q * seen + (1 - q) * p_mean
            var = q * spread + (1 - q) * p_var + q * (1 - q) * off**2
            rho = 1 / (var + eps).sqrt()
            r, d = 1 / (rho * s[c]), (mean - norm.running_mean[c]) / s[c]
            if strength < 1:  # at 1 nothing is clipped
                most = 3 ** (1 / (1 - strength))
                r, d = r.clamp(1 / most, most), d.clamp(-5 / (1 - strength), 5 / (1 - strength))
            r, d = r**strength, strength * d
            z = r * (part - mean) * rho + d
            y[start : start + m, c] = norm.weight[c] * z + norm.bias[c]
            # Sums over the group: its own by 1 - λ, the expected ones by λ.
            at_mean = -norm.weight[c] * r * rho * ((1 - strength) * slope.sum() + strength * count * expected_g[c])
            own = (slope * r * (part - mean) * rho).sum() * rho**2
            at_var = -0.5 * norm.weight[c] * ((1 - strength) * own + strength * count * (r * rho) ** 2 * expected_gz[c])
            at_seen, at_spread = q * at_mean + 2 * q * (1 - q) * off * at_var, q * at_var
            dx[start : start + m, c] = (
                norm.weight[c] * r * rho * slope + at_seen / count + at_spread * 2 * (part - seen) / count
            )
            sums[0][c] += slope.sum()
            sums[1][c] += (slope * z).sum()
            d_gain += at_mean * off + at_var * (spread - p_var + (1 - 2 * q) * off**2)
            d_prior[0][c] += (1 - q) * (at_mean - 2 * q * off * at_var)
            d_prior[1][c] += (1 - q) * at_var
    return y, dx, sums, d_gain, d_prior
