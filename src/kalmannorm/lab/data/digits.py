"""scikit-learn's 1,797 real digits of 8×8 pixels: they come with its package, so nothing has to be fetched."""

from __future__ import annotations

import torch

from kalmannorm.lab.data.resident import Resident, Split
from kalmannorm.lab.errors import LabError

TEST_SIZE = 896  # whole groups at every statistics batch up to 128


def read() -> tuple[Split, Split]:
    """Training and test half; the split is stratified and always the same."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise LabError(
            f"digits come with scikit-learn ({error.name} is missing): pip install 'kalmannorm[lab]'"
        ) from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(range(len(labels)), test_size=TEST_SIZE, stratify=digits.target, random_state=0)
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def load(
    device: torch.device, image_size: int | None, train_examples: int | None, test_examples: int | None, seed: int
) -> Resident:
    train, test = read()
    mean, std = train.images.mean().view(1), train.images.std().view(1)
    train, test = (
        train.subset(train_examples, seed).resized(image_size),
        test.subset(test_examples, seed).resized(image_size),
    )
    return Resident("digits", 10, train, test, mean=mean, std=std, padding=0, device=device)
