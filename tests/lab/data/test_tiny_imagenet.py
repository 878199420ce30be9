"""Tiny-ImageNet in its usual folders: read, kept decoded, verified, fetched."""

from __future__ import annotations

import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kalmannorm.lab import data
from kalmannorm.lab.data import catalogue, tiny_imagenet
from kalmannorm.lab.data.files import DamagedDataError, MissingDataError
from kalmannorm.lab.errors import LabError


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """Three classes of four images, and five to test on, in the usual folders."""
    small = tiny_imagenet.TinyImageNet(classes=3, per_class=4, test_size=5)
    monkeypatch.setitem(catalogue.SOURCES, "tiny-imagenet", small)
    base = tmp_path / "tiny-imagenet-200"
    for label, name in enumerate(("n01", "n02", "n03")):
        (base / "train" / name / "images").mkdir(parents=True)
        for i in range(4):
            shade = 50 * label + 10 * i
            Image.new("RGB", (64, 64), (shade, shade, 20)).save(base / "train" / name / "images" / f"{name}_{i}.JPEG")
    (base / "val" / "images").mkdir(parents=True)
    lines = []
    for i, name in enumerate(("n03", "n01", "n02", "n03", "n01")):
        Image.new("L", (64, 64), 40 * i).save(base / "val" / "images" / f"val_{i}.JPEG")  # some are grey
        lines.append(f"val_{i}.JPEG\t{name}\t0\t0\t63\t63\n")
    (base / "val" / "val_annotations.txt").write_text("".join(lines))
    return tmp_path


def test_tiny_imagenet(tiny):
    found = data.load("tiny-imagenet", root=tiny)
    assert (found.train_size, found.test_size, found.shape, found.padding) == (12, 5, (3, 64, 64), 8)
    assert next(found.test_batches(5))[1].tolist() == [2, 0, 1, 2, 0]
    images, labels = next(found.plain_batches(12))
    assert torch.bincount(labels).tolist() == [4, 4, 4] and labels.tolist() != sorted(labels.tolist())
    order = images[:, 0, 0, 0].argsort()
    assert labels[order].tolist() == sorted(labels.tolist())  # shades rise with the class


def test_tiny_imagenet_is_decoded_once_and_anew_when_it_changes(tiny, monkeypatch):
    decoded = []
    decode = tiny_imagenet.decoding.pixels
    monkeypatch.setattr(tiny_imagenet.decoding, "pixels", lambda *given: decoded.append(1) or decode(*given))
    first = next(data.load("tiny-imagenet", root=tiny).plain_batches(12))
    second = next(data.load("tiny-imagenet", root=tiny).plain_batches(12))
    assert len(decoded) == 2 and torch.equal(first[0], second[0])
    cache = tiny / "tiny-imagenet-200.npz"
    content = bytearray(cache.read_bytes())
    content[len(content) // 2] ^= 1
    cache.write_bytes(content)
    assert torch.equal(next(data.load("tiny-imagenet", root=tiny).plain_batches(12))[0], first[0])
    assert len(decoded) == 4  # the damaged cache was not believed
    path = tiny / "tiny-imagenet-200" / "val" / "images" / "val_0.JPEG"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    data.load("tiny-imagenet", root=tiny)
    assert len(decoded) == 6


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (
            lambda base: (base / "train" / "n02" / "images" / "n02_1.JPEG").unlink(),
            DamagedDataError,
            "3 images instead of 4",
        ),
        (lambda base: (base / "train" / "extra").mkdir(), DamagedDataError, "4 classes instead of 3"),
        (
            lambda base: (base / "val" / "images" / "val_3.JPEG").unlink(),
            DamagedDataError,
            "some of its 5 images are missing",
        ),
        (lambda base: (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\n"), DamagedDataError, "a line"),
        (lambda base: (base / "val" / "val_annotations.txt").unlink(), MissingDataError, "there is no"),
        (lambda base: (base / "val" / "images" / "val_3.JPEG").write_bytes(b"no"), DamagedDataError, r"val_3\.JPEG"),
        (
            lambda base: Image.new("RGB", (32, 64)).save(base / "val" / "images" / "val_3.JPEG"),
            DamagedDataError,
            "32×64 pixels instead of 64×64",
        ),
    ],
    ids=["image", "class", "test image", "annotation", "annotations", "noise", "size"],
)
def test_damaged_tiny_imagenet(tiny, harm, error, message):
    harm(tiny / "tiny-imagenet-200")
    for act in (lambda: data.load("tiny-imagenet", root=tiny), lambda: data.find("tiny-imagenet").check(tiny)):
        with pytest.raises(error, match=message) as caught:
            act()
        assert "\n" not in str(caught.value)


def unreachable(*_, **__):
    raise urllib.error.URLError("no route")


def test_tiny_imagenet_is_fetched_whole(tiny, monkeypatch):
    archive, target = tiny / "tiny.zip", tiny / "fresh"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in sorted((tiny / "tiny-imagenet-200").rglob("*")):
            zipped.write(path, path.relative_to(tiny))

    def download(url, folder, md5):
        zipfile.ZipFile(archive).extractall(folder)

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", unreachable)
    with pytest.raises(LabError, match=f"put the folder tiny-imagenet-200 from .*into {target}"):
        data.find("tiny-imagenet").fetch(target, lambda line: None)
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", download)
    data.find("tiny-imagenet").fetch(target, lambda line: None)
    assert data.load("tiny-imagenet", root=target).train_size == 12
