"""Image folders and data files with random damage and odd entries: each is refused in one line, passed by, or read.

A file of every format that an image folder may hold is cut, flipped, mixed or replaced by a pipe, a socket, a link or a
bomb; CIFAR's pickles, Tiny-ImageNet's annotations and its cache are damaged the same way. Nothing may hang.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import random
import shutil
import socket
import struct
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms.v2  # noqa: F401 - it takes seconds, which are no file's
from PIL import Image

from kalmannorm.lab import data
from kalmannorm.lab.data import cifar
from kalmannorm.lab.data.source import Options
from kalmannorm.lab.data.tiny_imagenet import TinyImageNet
from kalmannorm.lab.errors import LabError
from support.attacks.patience import HangError, patience

MUST_BE_ZERO = ("tracebacks", "hangs")
PATIENCE = 30
"""Seconds until a file counts as one that hangs."""
FORMATS = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".bmp": "BMP", ".pgm": "PPM", ".tif": "TIFF",
    ".tiff": "TIFF", ".webp": "WEBP",
}  # fmt: skip
SIDE = 8
NAMES = ("odd.png", "odd.jpg", "odd.webp", "odd", "odd.txt", "\udcff.png", "x" * 200 + ".PNG")


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """`count` files; "skipped" ones are no part of the data set, "read" ones can be decoded in spite of all."""
    choose = random.Random(seed)
    found = {"files": 0, "refused": 0, "skipped": 0, "read": 0, "tracebacks": 0, "hangs": 0}
    home = folder / "hostile"
    kinds: list[Callable[[random.Random, Path], str]] = [_image, _image, _image, _entry, _pickle, _tiny]
    for number in range(count):
        found["files"] += 1
        kind = choose.choice(kinds)
        home.mkdir(parents=True)
        try:
            with patience(PATIENCE, lambda: _release(home)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, of what it can mend
                found[kind(choose, home)] += 1
        except (Exception, HangError) as error:
            found["hangs" if isinstance(error, HangError) else "tracebacks"] += 1
            told = traceback.format_exc()
            print(f"hostile: attack {number} of seed {seed}, by {kind.__name__}:\n{told}", file=sys.stderr)
        finally:
            shutil.rmtree(home)
    return found


def _release(home: Path) -> None:
    """A thread that waits for the writer of a pipe would be waited for itself."""
    for path in home.rglob("*"):
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR))


def _judged(act: Callable[[], object]) -> str:
    """How it ended; a refusal must be one line."""
    try:
        act()
    except LabError as error:
        said = str(error)
    else:
        return "read"
    assert "\n" not in said, said
    return "refused"


def _damaged(choose: random.Random, content: bytes) -> bytes:
    """The same, but for a few bytes, a hole, an end, or most of it."""
    found = bytearray(content)
    for _ in range(choose.choice((1, 1, 2, 5))):
        at = choose.randrange(len(found) + 1)
        way = choose.randrange(6)
        if way == 0:
            del found[at:]
        elif way == 1:
            del found[at : at + choose.choice((1, 2, 100))]
        elif way == 2:
            found[at:at] = choose.randbytes(choose.choice((1, 4, 1000)))
        elif way == 3:
            found[at : at + 4] = choose.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"))
        elif way == 4:
            for place in choose.choices(range(len(found) or 1), k=choose.choice((1, 3, 30))):
                found[place : place + 1] = choose.randbytes(1)
        else:
            found[: choose.choice((4, 20))] = b""
    return bytes(found)


def _folder(home: Path) -> Path:
    """An image folder of one class; where odd things are put into."""
    for part in ("train", "val"):
        (home / part / "ant").mkdir(parents=True)
        Image.new("RGB", (SIDE, SIDE)).save(home / part / "ant" / "0.png")
    return home / "train" / "ant"


def _folder_outcome(home: Path) -> str:
    """Checked, and trained on."""
    name = f"folder:{home}"
    known = data.find(name).counted(home).train_size
    checked = _judged(lambda: data.find(name).check(home))
    found = data.load(name, image_size=SIDE, workers=0)
    trained = _judged(lambda: list(found.train_batches(found.train_size, seed=0, epoch=0)))
    assert checked == trained, f"checked: {checked}, trained: {trained}"
    return "skipped" if known == 1 else checked


def _image(choose: random.Random, home: Path) -> str:
    suffix = choose.choice(list(FORMATS))
    width, height = (choose.choice((1, 3, 20)) for _ in range(2))
    mode = "L" if suffix == ".pgm" else choose.choice(("RGB", "L"))
    buffer = io.BytesIO()
    Image.frombytes(mode, (width, height), choose.randbytes(width * height * len(mode))).save(buffer, FORMATS[suffix])
    if choose.random() < 0.2:
        suffix = choose.choice(list(FORMATS))  # another name than its content has
    (_folder(home) / f"odd{suffix}").write_bytes(_damaged(choose, buffer.getvalue()))
    return _folder_outcome(home)


def _entry(choose: random.Random, home: Path) -> str:
    """What is no image at all, or far too much of one."""
    inside = _folder(home)
    path = inside / choose.choice(NAMES)
    make = choose.choice((os.mkfifo, _socket, _links, _files, _folders, _bomb))
    if make is _bomb or make is _files:
        make(path, choose)  # type: ignore[call-arg]
    else:
        make(path)
    return _folder_outcome(home)


def _socket(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path may have no more than 108 characters
    try:
        server.bind("s" + path.suffix)
    finally:
        os.chdir(here)
        server.close()


def _links(path: Path) -> None:
    targets = (path.name, "nowhere", "/dev/zero", "/dev/full", ".", "..", "../..", "/proc/self/mem", "0.png")
    for number, target in enumerate(targets):
        path.with_name(f"{number}{path.suffix}").unlink(missing_ok=True)
        path.with_name(f"{number}{path.suffix}").symlink_to(target)
    if not path.with_name("0.png").is_file():
        path.with_name("0.png").unlink(missing_ok=True)
        Image.new("RGB", (SIDE, SIDE)).save(path.with_name("0.png"))


def _files(path: Path, choose: random.Random) -> None:
    path.write_bytes(choose.choice((b"", b"\0", b"\x89PNG\r\n\x1a\n", choose.randbytes(3000), b"\0" * 3000, b"GIF89a")))


def _folders(path: Path) -> None:
    (path / "deep" / "odd.png").mkdir(parents=True)
    (path / "deep" / "again.png").symlink_to("..")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _bomb(path: Path, choose: random.Random) -> None:
    """A PNG of a few bytes that says it is large, or like a thread, or brings a long text."""
    sizes = ((12_000, 12_000), (50_000, 50_000), (2**31 - 1, 2**31 - 1), (1, 80_000_000), (0, 0), (SIDE, SIDE))
    width, height = choose.choice(sizes)
    header = struct.pack(">IIBBBBB", width, height, 8, choose.choice((0, 2, 3, 6)), 0, 0, 0)
    text = b"key\0\0" + zlib.compress(bytes(choose.choice((10, 10**7))))
    chunks = {b"IHDR": header, b"zTXt": text, b"IDAT": zlib.compress(bytes(1000)), b"IEND": b""}
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks.items()))


def _pickle(choose: random.Random, home: Path) -> str:
    """One of CIFAR's files. What it holds is known by its checksum, so that only what is whole is read."""
    rng = np.random.default_rng(choose.randrange(2**32))
    pixels, labels = rng.integers(0, 256, (2, cifar.PIXELS), np.uint8), rng.integers(0, 10, 2)
    file = cifar.File("batch", 2, "", cifar.content_digest(pixels, labels))
    source = dataclasses.replace(cifar.CIFAR10, train_files=(file,), test_file=file)
    content = pickle.dumps({"labels": labels.tolist(), "data": pixels}, protocol=choose.choice((1, 2, 4)))
    bombs = (
        b"]r\xff\xff\xff\x7f.",  # a place in the memo that would take gigabytes
        b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b".",
        b"\x80\x02" + b"]" * 100_000 + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 2**50) + b".",
    )  # fmt: skip
    filling = bytes(3 * cifar.PIXELS)
    content = choose.choice(bombs) + filling if choose.random() < 0.2 else _damaged(choose, content)
    source.where(home).mkdir()
    (source.where(home) / "batch").write_bytes(content)
    return _judged(lambda: source.check(home))


def _tiny(choose: random.Random, home: Path) -> str:
    """Tiny-ImageNet's annotations, an image, or the cache beside it."""
    source = TinyImageNet(classes=2, per_class=1, test_size=2, image_size=SIDE)
    base = source.where(home)
    for path in (base / "train" / "a" / "images", base / "train" / "b" / "images", base / "val" / "images"):
        path.mkdir(parents=True)
    images = [base / "train" / name / "images" / f"{name}_0.JPEG" for name in "ab"]
    images += [base / "val" / "images" / f"{i}.JPEG" for i in range(2)]
    for path in images:
        Image.new("RGB", (SIDE, SIDE)).save(path)
    annotations = base / "val" / "val_annotations.txt"
    annotations.write_text("0.JPEG\ta\t0\n1.JPEG\tb\t0\n")
    cache = home / f"{source.folder}.npz"
    options = Options(torch.device("cpu"))
    path = choose.choice((annotations, choose.choice(images), cache))
    if path == cache:
        source.load(home, options)
    path.write_bytes(_damaged(choose, path.read_bytes()))
    if choose.random() < 0.1:
        path.unlink()
        os.mkfifo(path)
    return _judged(lambda: source.load(home, options))
