"""All named data sets."""

from __future__ import annotations

from kalmannorm.lab.data.cifar import CIFAR10, CIFAR100
from kalmannorm.lab.data.digits import Digits
from kalmannorm.lab.data.files import at_home
from kalmannorm.lab.data.folder import PREFIX, ImageFolders
from kalmannorm.lab.data.source import Source
from kalmannorm.lab.data.tiny_imagenet import TinyImageNet
from kalmannorm.lab.errors import LabError, one_of

SOURCES: dict[str, Source] = {
    source.name: source for source in (Digits(), CIFAR10, CIFAR100, TinyImageNet(), ImageFolders("imagenet"))
}


def names() -> list[str]:
    return list(SOURCES)


def find(name: str) -> Source:
    """The data set with this name. "folder:PATH" is the image folder at PATH."""
    if name.startswith(PREFIX):
        path = name.removeprefix(PREFIX)
        if not path:
            raise LabError("folder: needs a path, as in folder:/data/flowers, which contains train/ and val/")
        return ImageFolders(name, at_home(path))
    return SOURCES[one_of("dataset", name, [*SOURCES, f"{PREFIX}PATH"])]
