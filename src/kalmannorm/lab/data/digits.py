"""scikit-learn's 1,797 real digits of 8×8 pixels. They come with its package, so nothing has to be downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kalmannorm.lab.data.files import MissingDataError, Say
from kalmannorm.lab.data.resident import Resident, Split
from kalmannorm.lab.data.source import Options


@dataclass(frozen=True)
class Digits:
    name: str = "digits"
    classes: int = 10
    image_size: int = 8
    train_size: int = 901
    test_size: int = 896  # whole groups at every statistics batch up to 128

    def where(self, root: Path) -> None:
        return None

    def look(self, root: Path) -> None:
        self.read()

    def check(self, root: Path) -> None:
        self.read()

    def counted(self, root: Path) -> Digits:
        return self

    def fetch(self, root: Path, say: Say) -> None:
        self.read()

    def read(self) -> tuple[Split, Split]:
        """Training and test set. The split is stratified and always the same."""
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ModuleNotFoundError:
            raise MissingDataError("digits come with scikit-learn: pip install 'kalmannorm[lab]'") from None
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
        labels = torch.tensor(digits.target, dtype=torch.int64)
        train, test = train_test_split(
            range(len(labels)), test_size=self.test_size, stratify=digits.target, random_state=0
        )
        return Split(images[train], labels[train]), Split(images[test], labels[test])

    def load(self, root: Path, options: Options) -> Resident:
        train, test = self.read()
        mean, std = train.images.mean().view(1), train.images.std().view(1)
        return Resident.chosen(self, train, test, options, mean=mean, std=std, padding=0)
