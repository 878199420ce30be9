"""Image folders with what is no image in them: it is named in one line, never waited for, and no bomb is decoded."""

from __future__ import annotations

import os
import socket
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kalmannorm.lab import data
from kalmannorm.lab.data import decoding
from kalmannorm.lab.data.files import DamagedDataError
from kalmannorm.lab.data.tiny_imagenet import _read_cache
from kalmannorm.lab.errors import LabError
from kalmannorm_command.app import run


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *more: bytes) -> bytes:
    """A PNG of one grey, which is small whatever its size."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    pixels = b"".join(packer.compress(row * min(1024, height - y)) for y in range(0, height, 1024)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + b"".join((chunk(b"IHDR", header), *more, chunk(b"IDAT", pixels), chunk(b"IEND", b"")))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes of two images."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                pixels = rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def refused(folder: Path) -> str:
    """What training and checking both say of it."""
    found = data.load(f"folder:{folder}", image_size=8, workers=0)
    with pytest.raises(DamagedDataError) as trained:
        list(found.train_batches(found.train_size, seed=0, epoch=0))
    with pytest.raises(DamagedDataError) as checked:
        data.find(f"folder:{folder}").check(folder)
    assert str(trained.value) == str(checked.value) and "\n" not in str(checked.value)
    return str(checked.value)


def bind(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path may have no more than 108 characters
    try:
        server.bind(path.name)
    finally:
        os.chdir(here)
        server.close()


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        bind,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"GIF89a"),
        lambda path: path.write_bytes(png(4, 4)[:45]),
        lambda path: path.write_bytes(png(4, 4, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(10**7))))),
    ],
    ids=["FIFO", "socket", "device", "link to itself", "link to nothing", "empty", "cut", "truncated", "huge text"],
)
def test_what_is_no_image_is_named(folder, make):
    path = folder / "train" / "ant" / "odd.png"
    make(path)
    line = refused(folder)
    assert line.startswith(f"{path} is not a ") and line.endswith("restore it or delete it")


@pytest.mark.parametrize("side", [12_000, 14_000], ids=["Pillow warns", "Pillow refuses"])
def test_an_image_of_too_many_pixels_is_not_decoded(folder, monkeypatch, side):
    path = folder / "train" / "ant" / "odd.png"
    path.write_bytes(png(side, side))
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it is decoded"))
    with pytest.raises(DamagedDataError, match=r"odd\.png has .*89,478,485.*: scale it down or delete it"):
        decoding.opened(path)


def test_pillow_does_not_warn_beside_the_line(capsys, folder, recwarn):
    import warnings

    warnings.simplefilter("always")
    (folder / "train" / "ant" / "odd.png").write_bytes(png(12_000, 12_000))
    assert run(["data", "check", f"folder:{folder}"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1 and not recwarn.list


def test_an_image_like_a_thread(folder):
    """Scaled to its short side it would have billions of pixels."""
    (folder / "train" / "ant" / "odd.png").write_bytes(png(1, 60_000))
    assert "1×60,000 pixels" in refused(folder)


def test_links_that_lead_back(folder):
    """Two of them in a folder would be followed 2⁴⁰ times; images of other classes are not taken for this one's."""
    before = data.load(f"folder:{folder}", image_size=8, workers=0)
    for place in (folder / "train" / "ant", folder / "train" / "bee", folder / "val" / "ant"):
        for name, target in (("here", "."), ("again", "."), ("up", ".."), ("top", "../..")):
            (place / name).symlink_to(target)
    found = data.load(f"folder:{folder}", image_size=8, workers=0)
    assert (found.classes, found.train_size, found.test_size) == (2, 4, 4)
    assert [found._train[i] for i in range(4)] == [before._train[i] for i in range(4)]


def test_files_lie_in_torchvisions_order(folder):
    """A run that goes on must see the same images in the same places."""
    from torchvision.datasets import ImageFolder

    for name in ("a", "a-b", "a/c", "B", "a.png"):
        (folder / "train" / "bee" / name).mkdir()
        Image.new("RGB", (4, 4)).save(folder / "train" / "bee" / name / "x.PNG")
        (folder / "train" / "bee" / name / "notes.txt").touch()
    (folder / "train" / "bee" / "linked").symlink_to(folder / "val" / "ant")
    samples = ImageFolder(os.fspath(folder / "train")).samples
    paths, labels = data.find(f"folder:{folder}")._files(folder, "train")
    assert list(zip(paths, labels, strict=True)) == samples and len(samples) == 4 + 5 + 2


def test_a_reader_that_dies_is_told_in_one_line(folder, monkeypatch):
    """As where it is killed for lack of memory."""
    monkeypatch.setattr(decoding, "opened", lambda path: os._exit(9))
    with pytest.raises(LabError, match="--workers") as caught:
        list(data.load(f"folder:{folder}", image_size=8, workers=1).test_batches(2))
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_none(tmp_path, monkeypatch):
    """A pipe is not waited for; an array that claims to be huge, and whatever else a reader raises, is no cache."""
    os.mkfifo(tmp_path / "pipe.npz")
    assert _read_cache(tmp_path / "pipe.npz", "") is None
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1152921504606846976,)}"
    huge = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as file:
        file.writestr("fingerprint.npy", huge)
    assert _read_cache(tmp_path / "huge.npz", "") is None
