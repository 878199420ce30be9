"""Hooks of a converted model that tell its relay when a forward begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kalmannorm._running.relay import Relay
from kalmannorm._support.compiling import in_whole_model, leave_to_python, set_callback
from kalmannorm._support.pickles import Complete


@dataclass
class Begin(Complete):
    """A forward pre-hook. It is an object, not a closure, so that the model can be pickled."""

    relay: Relay
    whole: bool

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            if self.relay.compiles and (self.whole or not in_whole_model()):
                self.relay.enter(self.whole, module, True)
            return
        compiler = set_callback(None)
        try:
            if self.whole or not in_whole_model():
                self.relay.enter(self.whole, module, compiler is not None)
        finally:
            set_callback(compiler)


@dataclass
class End(Complete):
    """A forward hook. It is also called if the forward fails."""

    relay: Relay
    whole: bool

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            if self.relay.compiles and (self.whole or not in_whole_model()):
                self.relay.leave(self.whole)
            return
        compiler = set_callback(None)
        try:
            if self.whole or not in_whole_model():
                self.relay.leave(self.whole)
        finally:
            set_callback(compiler)


# Around a compiled model they are work for Python, and not worth a compilation of their own.
leave_to_python(Begin.__call__)
leave_to_python(End.__call__)
