"""Batch Kalman Normalization in your own training loop: a plain BatchNorm network, one call, and the network to deploy.

    python examples/own_loop.py

It takes half a minute on a CPU. A gradient step has sixteen examples, but only two of them share their statistics, as
on eight devices with two examples each. `kalmannorm compare` does this for many networks, norms and settings, and draws
the results.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm

EPOCHS, BATCH = 12, 16


def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return 100 * (net.eval()(images).argmax(1) == labels).float().mean().item()


def main(epochs: int = EPOCHS) -> nn.Module:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = shuffled[:900], shuffled[900:]

    torch.manual_seed(0)
    net = nn.Sequential(
        block(1, 16), block(16, 32, stride=2), block(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )
    net = kalmannorm.convert(net, images[:2], statistics_batch_size=2)
    print(kalmannorm.wiring(net))

    groups = kalmannorm.parameter_groups(net, weight_decay=5e-4)  # no weight decay for γ, β and the filter
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(train) // BATCH))
    for epoch in range(epochs):
        net.train()
        for batch in train[torch.randperm(len(train))].split(BATCH)[: len(train) // BATCH]:
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        right = accuracy(net, images[test], labels[test])
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {right:.1f} %")

    for mode in ("batch", "example", "population"):  # the last one is deployed
        kalmannorm.set_inference(net, mode)
        print(f"{mode} inference: {accuracy(net, images[test], labels[test]):.1f} %")
    plain = kalmannorm.fold(net)  # convolutions and ReLUs, no norms
    print(f"folded: {accuracy(plain, images[test], labels[test]):.1f} %")
    return plain


if __name__ == "__main__":
    main()
