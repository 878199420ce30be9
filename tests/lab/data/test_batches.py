"""Batches are a function of (seed, epoch, position) alone: for data on the device and for files that are streamed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F

from kalmannorm.lab import data
from kalmannorm.lab.data.files import DamagedDataError, MissingDataError
from kalmannorm.lab.data.randomness import stratified
from kalmannorm.lab.data.resident import Resident, Split, crop_and_flip, draw
from kalmannorm.lab.errors import LabError
from kalmannorm_command.app import run


def resident(count: int = 40, side: int = 8, padding: int = 2) -> Resident:
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    split = Split(images, torch.arange(count) % 10)
    return Resident(
        "random", 10, split, split, mean=torch.ones(3), std=torch.ones(3), padding=padding, device=torch.device("cpu")
    )


def write_images(folder: Path, counts: dict[str, int], rng: np.random.Generator) -> None:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            height, width = rng.integers(40, 60, 2)
            small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(small).resize((int(width), int(height))).save(folder / name / f"{i}.jpg")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    write_images(folder / "train", {"ant": 9, "bee": 9, "fly": 6}, rng)
    write_images(folder / "val", {"ant": 4, "bee": 4, "fly": 3}, rng)
    return folder


@pytest.fixture(params=["resident", "streaming"])
def any_data(request, image_folder) -> data.Data:
    if request.param == "resident":
        return resident()
    return data.load(f"folder:{image_folder}", image_size=16, workers=0)


def same(first: list[data.Batch], second: list[data.Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


# What every data set promises


def test_batches_depend_on_seed_and_epoch_alone(any_data):
    first = list(any_data.train_batches(8, seed=1, epoch=2))
    torch.rand(3)  # the global generator has no say
    assert same(first, list(any_data.train_batches(8, seed=1, epoch=2)))
    plain = next(any_data.train_batches(8, seed=1, epoch=2, augment=False))
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}):
        assert not torch.equal(plain[0], next(any_data.train_batches(8, augment=False, **other))[0])  # another order


def test_batches_leave_the_global_generator_alone(any_data):
    before = torch.get_rng_state()
    list(any_data.train_batches(8, seed=0, epoch=0))
    list(any_data.test_batches(8))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_epoch_resumes_at_any_batch(any_data, start):
    whole = list(any_data.train_batches(8, seed=0, epoch=1))
    assert same(list(any_data.train_batches(8, seed=0, epoch=1, start=start)), whole[start:])


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_the_ranks_are_the_batch(any_data, ranks):
    whole = list(any_data.train_batches(8, seed=0, epoch=0))
    shares = [list(any_data.train_batches(8, seed=0, epoch=0, rank=rank, ranks=ranks)) for rank in range(ranks)]
    joined = [tuple(torch.cat(parts) for parts in zip(*batch, strict=True)) for batch in zip(*shares, strict=True)]
    assert same(joined, whole)


def test_an_epoch_sees_each_example_at_most_once(any_data):
    labels = torch.cat([batch[1] for batch in any_data.train_batches(7, seed=0, epoch=0)])
    assert len(labels) == any_data.train_size // 7 * 7
    images = torch.cat([batch[0] for batch in any_data.train_batches(8, seed=0, epoch=0, augment=False)])
    assert len(images.flatten(1).unique(dim=0)) == len(images)


def test_without_augmentation_images_are_those_of_the_plain_batches(any_data):
    plain = {tuple(image.flatten()[:9].tolist()) for images, _ in any_data.plain_batches(5) for image in images}
    assert len(plain) == any_data.train_size
    for images, _ in any_data.train_batches(8, seed=0, epoch=0, augment=False):
        assert all(tuple(image.flatten()[:9].tolist()) in plain for image in images)


@pytest.mark.parametrize("kind", ["test_batches", "plain_batches"])
def test_ranks_divide_a_whole_pass_by_batches(any_data, kind):
    batches = getattr(any_data, kind)
    whole = list(batches(4))
    assert sum(len(labels) for _, labels in whole) == (
        any_data.test_size if kind == "test_batches" else any_data.train_size
    )
    assert same(list(batches(4, rank=1, ranks=2)), whole[1::2])


def test_too_few_examples_for_a_batch(any_data):
    with pytest.raises(LabError, match="fewer than a gradient batch of 64"):
        any_data.train_batches(64, seed=0, epoch=0)
    with pytest.raises(LabError, match="3 processes cannot share"):
        any_data.train_batches(8, seed=0, epoch=0, ranks=3)


# On the device


def test_digits_are_scikit_learns_split_once_for_all():
    """Every digit is in one half, normalized by the training half's pixels; classes are as frequent in both."""
    digits = data.load("digits")
    assert (digits.train_size, digits.test_size, digits.classes, digits.shape) == (901, 896, 10, (1, 8, 8))
    images, labels = next(digits.plain_batches(901))
    tested, targets = next(digits.test_batches(896))
    assert images.mean().abs() < 1e-5 and abs(images.std() - 1) < 1e-4
    pixels = (torch.cat([images, tested]) * digits.std + digits.mean).round().int().flatten(1)
    original = load_digits()
    assert sorted(map(tuple, pixels.tolist())) == sorted(map(tuple, original.data.astype(int).tolist()))
    assert (labels.bincount() - targets.bincount()).abs().max() <= 2


def test_digits_are_never_augmented():
    digits = data.load("digits")
    augmented, plain = (next(digits.train_batches(64, seed=0, epoch=0, augment=flag)) for flag in (True, False))
    assert torch.equal(augmented[0], plain[0])


def test_each_image_is_cropped_and_flipped_as_drawn():
    images = torch.randn(16, 3, 6, 5)
    moves = draw(16, 2, torch.Generator().manual_seed(0))
    assert moves[:, 2].unique().tolist() == [0, 1] and moves[:, :2].min() == 0 and moves[:, :2].max() == 4
    padded = F.pad(images, (2, 2, 2, 2))
    for image, (top, left, flip), found in zip(padded, moves.tolist(), crop_and_flip(images, moves, 2), strict=True):
        expected = image[:, top : top + 6, left : left + 5]
        assert torch.equal(found, expected.flip(2) if flip else expected)


def test_augmentation_differs_between_images_batches_and_epochs():
    """On a set of one image again and again, a batch shows what was drawn and nothing else."""
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(32, 1, 8, 8)
    split, one = Split(images, torch.zeros(32, dtype=torch.int64)), torch.ones(1)
    found = Resident("one", 1, split, split, mean=one, std=one, padding=2, device=torch.device("cpu"))
    first, second = (batch for batch, _ in found.train_batches(16, seed=0, epoch=0))
    assert len(first.flatten(1).unique(dim=0)) > 8
    assert not torch.equal(first, second)
    assert not torch.equal(first, next(found.train_batches(16, seed=0, epoch=1))[0])
    assert not torch.equal(first, next(found.train_batches(16, seed=1, epoch=0))[0])


def test_moments_are_those_of_the_pixels():
    images = torch.randint(0, 256, (1500, 3, 4, 4), dtype=torch.uint8)
    mean, std = Split(images, torch.zeros(1500)).moments()
    torch.testing.assert_close(mean, images.double().mean((0, 2, 3)))
    torch.testing.assert_close(std, images.double().std((0, 2, 3), correction=0))


def test_image_size_scales_the_images():
    digits = data.load("digits", image_size=16)
    images, _ = next(digits.plain_batches(901))
    small, _ = next(data.load("digits").plain_batches(901))
    assert digits.shape == (1, 16, 16) == tuple(images.shape[1:])
    assert (F.avg_pool2d(images, 2) - small).abs().mean() < 0.2  # the standard deviation is 1


# Parts of a data set


def test_a_part_is_stratified_and_grows():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    parts = [set(stratified(labels, count).tolist()) for count in (10, 20, 50)]
    assert parts[0] < parts[1] < parts[2]
    assert torch.bincount(labels[stratified(labels, 20)]).tolist() == [10, 6, 4]
    assert stratified(labels, 1000).tolist() == list(range(100))
    assert not torch.equal(stratified(labels, 20, seed=1), stratified(labels, 20))


def test_train_and_test_examples():
    part = data.load("digits", train_examples=100, test_examples=50)
    assert (part.train_size, part.test_size) == (100, 50)
    again, whole = data.load("digits", train_examples=100), data.load("digits")
    assert torch.equal(next(part.plain_batches(100))[0], next(again.plain_batches(100))[0])
    known = {tuple(image.flatten().tolist()) for image in next(whole.plain_batches(901))[0]}
    assert all(tuple(image.flatten().tolist()) in known for image in next(part.plain_batches(100))[0])


# From files


def test_workers_do_not_matter(image_folder):
    alone, helped = (data.load(f"folder:{image_folder}", image_size=16, workers=workers) for workers in (0, 2))
    for epoch in (0, 1):
        assert same(
            list(alone.train_batches(6, seed=0, epoch=epoch, start=1)),
            list(helped.train_batches(6, seed=0, epoch=epoch, start=1)),
        )


def test_an_image_folder(image_folder):
    found = data.load(f"folder:{image_folder}", image_size=16, workers=0)
    assert (found.classes, found.train_size, found.test_size, found.shape) == (3, 24, 11, (3, 16, 16))
    labels = torch.cat([labels for _, labels in found.test_batches(4)])
    assert torch.bincount(labels).tolist() == [4, 4, 3]
    assert not torch.equal(labels, labels.sort().values)  # neighbours share statistics: classes must be mixed
    part = data.load(f"folder:{image_folder}", image_size=16, workers=0, train_examples=8)
    assert torch.bincount(next(part.plain_batches(8))[1]).tolist() == [3, 3, 2]
    assert part.classes == 3


def test_test_images_are_the_centre_normalized(image_folder):
    found = data.load(f"folder:{image_folder}", image_size=32, workers=0)
    images, labels = next(found.test_batches(11))
    path = image_folder / "val" / "ant" / "0.jpg"
    from torchvision.transforms import v2

    center = v2.Compose([v2.Resize(37), v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    expected = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))(center(Image.open(path)))
    assert min((image - expected).abs().max() for image in images[labels == 0]) < 1e-5


def test_imagenet_is_an_image_folder_of_the_root(image_folder, tmp_path):
    (tmp_path / "imagenet").symlink_to(image_folder)
    assert data.load("imagenet", root=tmp_path, workers=0).shape == (3, 224, 224)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named_in_one_line(tmp_path, workers):
    rng = np.random.default_rng(0)
    write_images(tmp_path / "train", {"ant": 4, "bee": 4}, rng)
    write_images(tmp_path / "val", {"ant": 1, "bee": 1}, rng)
    damaged = tmp_path / "train" / "bee" / "2.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    found = data.load(f"folder:{tmp_path}", image_size=16, workers=workers)
    with pytest.raises(LabError) as caught:
        list(found.train_batches(4, seed=0, epoch=0))
    assert str(damaged) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DamagedDataError, match=r"2\.jpg"):
        data.find(f"folder:{tmp_path}").check(tmp_path)


def test_a_checked_folder_says_what_is_in_it(capsys, tmp_path):
    for part, counts in (("train", {"ant": 3, "bee": 2}), ("val", {"ant": 1, "bee": 1})):
        write_images(tmp_path / "images" / part, counts, np.random.default_rng(0))
    name = f"folder:{tmp_path / 'images'}"
    assert run(["data", "check", name, "--data-root", str(tmp_path / "root"), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert [record[key] for key in ("classes", "train_size", "test_size", "state")] == [2, 5, 2, "ready"]
    assert run(["data", "check", name, "--data-root", str(tmp_path / "root")]) == 0
    out = capsys.readouterr().out
    assert "?" not in out and "Folders are in" not in out, "it lies elsewhere"
    assert run(["data", "check", name, "--data-root", str(tmp_path)]) == 0
    assert f"Folders are in {tmp_path}" in capsys.readouterr().out


def test_folders_that_are_no_data_set(tmp_path):
    for name, remedy in (("imagenet", "put your copy there"), (f"folder:{tmp_path / 'nowhere'}", "give the path")):
        with pytest.raises(MissingDataError, match=f"^there is no folder .*: {remedy}"):
            data.load(name, root=tmp_path)
    with pytest.raises(MissingDataError, match="train must contain a folder of images per class"):
        data.load(f"folder:{tmp_path}")
    write_images(tmp_path / "train", {"ant": 1, "bee": 1}, np.random.default_rng(0))
    (tmp_path / "val").mkdir()  # images without class folders, as ImageNet's archive has them
    with pytest.raises(MissingDataError, match="val must contain a folder of images per class"):
        data.load(f"folder:{tmp_path}")
    (tmp_path / "val" / "ant").mkdir()
    with pytest.raises(MissingDataError, match="same classes; only one has bee"):
        data.load(f"folder:{tmp_path}")
    (tmp_path / "val" / "bee").mkdir()
    with pytest.raises(MissingDataError) as caught:
        data.load(f"folder:{tmp_path}")
    assert "ant" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar11", {}, "did you mean 'cifar10'"),
        ("folder:", {}, "needs a path"),
        ("digits", {"train_examples": 0}, "--train-examples must be at least 1"),
        ("digits", {"image_size": -1}, "--image-size must be a whole number from 1"),
        ("digits", {"workers": -1}, "--workers must be at least 0"),
    ],
)
def test_mistakes(name, options, message):
    with pytest.raises(LabError, match=message):
        data.load(name, **options)
