"""x in groups as PyTorch's operations see them, without a copy, and the sums over groups that the op needs.

On a CPU the sums are those of PyTorch's own batch norm where its kernels can be asked for them: of contiguous x for all
groups at once, in channels_last for one large group after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmannorm.groups import group_size
from kalmannorm.moments import Moments

ENOUGH, ENOUGH_OF_FEW = 40_000, 500_000
"""Values of a group that are worth a call of their own, in channels_last on a CPU; the second below 64 channels."""
LONG = 8192
"""Positions that PyTorch's batch norm is given at a time: it sums them one after the other."""
EACH = 0  # no reduction, as losses number it
_ops: Any = torch.ops.aten


class Slabs:
    """x (N, C, *) seen in groups: (G, m, C, L), or (G, m·L, C) for channels_last; a smaller last group by itself.

    With one position, as in (N, C), both views are the same memory, and channels last is the one that vectorises.
    """

    def __init__(self, x: Tensor, statistics_batch_size: int) -> None:
        self.examples, self.channels = x.shape[:2]
        self.size = group_size(self.examples, statistics_batch_size)
        self.positions = x.numel() // (self.examples * self.channels)
        self.last = not x.is_contiguous() or self.positions == 1
        self.over = (1,) if self.last else (1, 3)
        self.row = (-1, 1, self.channels) if self.last else (-1, 1, self.channels, 1)
        self.whole = self.examples // self.size
        self.ragged = self.whole > 0 and self.examples % self.size > 0
        on_cpu = x.device.type == "cpu"
        self.native = on_cpu and not self.last
        enough = ENOUGH if self.channels >= 64 else ENOUGH_OF_FEW
        self.by_group = (
            on_cpu and self.last and min(self.size, self.examples) * self.positions * self.channels >= enough
        )

    def parts(self, x: Tensor) -> list[Tensor]:
        """The groups of x, or of a tensor that lies as x does: those of full size, then the last."""
        if not self.ragged:
            return [self._view(x, self.whole or 1)]
        cut = self.whole * self.size
        return [self._view(x[:cut], self.whole), self._view(x[cut:], 1)]

    def _view(self, x: Tensor, groups: int) -> Tensor:
        if self.last:  # x lies without gaps, so this is movedim and view, at half their price
            values = x.shape[0] // groups * self.positions
            return x.as_strided((groups, values, self.channels), (values * self.channels, self.channels, 1))
        return x.view(groups, -1, self.channels, self.positions)

    def rows(self, moments_GC: Tensor) -> list[Tensor]:
        """Rows (G, C) or (1, C), shaped to broadcast over each of the parts."""
        rows = moments_GC.view(self.row)
        if not self.ragged or rows.shape[0] == 1:
            return [rows] * 2
        return [rows[: self.whole], rows[self.whole :]]

    def gather(self, rows: list[Tensor]) -> Tensor:
        """Rows of each of the parts, (g, 1, C) or (g, 1, C, 1), as one (G, C)."""
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(-1, self.channels)

    def moments(self, parts: list[Tensor], scratch: list[Tensor]) -> Moments:
        """Mean and variance, (G, C). `scratch` are parts to be overwritten, or the same."""
        if self.by_group:
            found = [moments_by_group(values) for values in parts]
            return Moments(self.gather([each.mean for each in found]), self.gather([each.var for each in found]))
        means = [values.mean(self.over, keepdim=True) for values in parts]
        for values, mean, squares in zip(parts, means, scratch, strict=True):
            _ops.mse_loss.out(values, mean, EACH, out=squares)
        return Moments(self.gather(means), self.gather([squares.mean(self.over) for squares in scratch]))

    def centred(self, parts: list[Tensor], mean_GC: Tensor) -> list[Tensor]:
        return [values - mean for values, mean in zip(parts, self.rows(mean_GC), strict=False)]

    def affine(self, parts: list[Tensor], scale_GC: Tensor, shift_GC: Tensor, results: list[Tensor]) -> None:
        """x · scale + shift, with a row of each for every group."""
        for values, scale, shift, out in zip(parts, self.rows(scale_GC), self.rows(shift_GC), results, strict=False):
            if self.last:
                torch.addcmul(shift, values, scale, out=out)
            else:  # which does not vectorise with two operands that stand still
                torch.mul(values, scale, out=out).add_(shift)

    def products(
        self, grads: list[Tensor], parts: list[Tensor], mean_GC: Tensor, scratch: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Σ g and Σ g (x - mean) of every group, (G, C). `scratch` are parts to be overwritten."""
        sums, products = [], []
        for g, values, mean, each in zip(grads, parts, self.rows(mean_GC), scratch, strict=False):
            if self.native:
                # One example with a channel for every row: PyTorch's batch-norm backward has both sums in one pass.
                rows, flat = values.shape[:3], (1, -1, self.positions)
                centre = mean.squeeze(3).expand(rows).reshape(-1)
                _, product, total = _ops.native_batch_norm_backward(
                    g.view(flat), values.view(flat), None, None, None, centre, torch.ones_like(centre), True, 0.0,
                    [False, True, True],
                )  # fmt: skip
                sums.append(total.view(rows).sum(1))
                products.append(product.view(rows).sum(1))
            elif self.by_group:
                total, product = products_by_group(g, values, mean)
                sums.append(total)
                products.append(product)
            else:
                _ops.mse_loss_backward.grad_input(g, values, mean, EACH, grad_input=each)  # 2 g (x - mean)
                sums.append(g.sum(self.over))
                products.append(each.sum(self.over).mul_(0.5))
        return self.gather(sums), self.gather(products)


def pieces(values_GKC: Tensor) -> list[tuple[Tensor, ...]]:
    """Groups as images of one example in channels_last, (1, C, 1, K); first parts of all, then second ones, ..."""
    groups, positions, channels = values_GKC.shape
    found = []
    for piece in values_GKC.tensor_split(-(-positions // LONG), 1) if positions > LONG else [values_GKC]:
        length = piece.shape[1]
        size = length * channels
        sizes, strides = (groups, 1, channels, 1, length), (positions * channels, size, 1, size, channels)
        found.append(piece.as_strided(sizes, strides).unbind())
    return found


def moments_by_group(values_GKC: Tensor) -> Moments:
    shares, means, variances = [], [], []
    for images in pieces(values_GKC):
        both = [_ops.batch_norm_update_stats(image, None, None, 0.0) for image in images]
        shares.append(images[0].shape[3] / values_GKC.shape[1])
        means.append(torch.stack([mean for mean, _ in both]))
        variances.append(torch.stack([var for _, var in both]))
    if len(shares) == 1:
        return Moments(means[0], variances[0])
    share, mean_PGC, var_PGC = means[0].new_tensor(shares), torch.stack(means), torch.stack(variances)
    mean = torch.einsum("p,pgc->gc", share, mean_PGC)
    return Moments(mean, torch.einsum("p,pgc->gc", share, (mean_PGC - mean).square_().add_(var_PGC)))


def products_by_group(g_GKC: Tensor, values_GKC: Tensor, mean_G1C: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g and Σ g (x - mean), (G, C)."""
    centres = mean_G1C.squeeze(1).expand(g_GKC.shape[0], -1).unbind()
    ones, backward = torch.ones_like(centres[0]), _ops.native_batch_norm_backward
    totals, products = [], []
    for grads, images in zip(pieces(g_GKC), pieces(values_GKC), strict=True):
        both = [
            backward(grad, image, None, None, None, centre, ones, True, 0.0, [False, True, True])[1:]
            for grad, image, centre in zip(grads, images, centres, strict=True)
        ]
        totals.append(torch.stack([total for _, total in both]))
        products.append(torch.stack([product for product, _ in both]))
    if len(totals) == 1:
        return totals[0], products[0]
    return torch.stack(totals).sum(0), torch.stack(products).sum(0)
