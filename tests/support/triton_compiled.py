"""Compile kernels without a GPU, and look at their assembly."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from support.ready_launches import forget

TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
SMALLEST = 99 * 1024
"""Shared memory that a program may have on consumer GPUs since Ampere."""


OPERATION = re.compile(r"\s*(?:@\S+ )?([\w.]+)\s+(%\w+)(?:\|%\w+)?,\s*(.*);")


def halves_that_differ(assembly):
    """Sums of a thread's product and what another thread holds, that are, or may be, one fused operation.

    The other thread fuses its own product: the two come out different, though both stand for the same result.
    """
    received, products, fused = set(), set(), []
    for line in assembly.splitlines():
        if match := OPERATION.match(line):
            name, to, given = match[1], match[2], re.findall(r"%\w+", match[3])
            if name.startswith("shfl.sync.bfly"):
                received.add(to)
            elif name.startswith("mov.b32"):
                for kept in (received, products):
                    kept |= {to} if kept & set(given) else set()
            elif name == "mul.f32":
                products.add(to)
            elif name.startswith("fma."):
                fused += [line] if given[-1] in received else []
            elif name in ("add.f32", "sub.f32") and received & set(given) and products & set(given):
                fused.append(line)
    return fused


class Compiled(dict):
    """The assembly of kernels, by name, and the most shared memory that each takes."""

    def __init__(self):
        super().__init__()
        self.shared = {}


@pytest.fixture
def compiled(monkeypatch):
    """Launches compile and do nothing else; the assembly of each, by the name of its kernel."""
    assembly = Compiled()

    def compile_only(self, *args, grid, warmup, num_warps=4, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.params):
            value, name = given[parameter.name], parameter.name
            special = isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (special and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (special and value % 16 == 0 and name not in constants):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, attributes)
        architecture = 90 if kwargs.get("launch_pdl") else 80
        kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": num_warps})
        assembly[self.__name__] = kernel.asm["ptx"]
        assert not halves_that_differ(kernel.asm["ptx"]), self.__name__
        assembly.shared[self.__name__] = max(kernel.metadata.shared, assembly.shared.get(self.__name__, 0))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    forget()
    yield assembly
    forget()
