"""The first step of a model on CUDA: its kernels are built together, and a second process finds all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

STEP = """
import json, sys
import torch, torchvision, triton
import kalmannorm
from kalmannorm._ops import triton_building

built, found = [], []
build = triton_building.build
triton_building.build = lambda wanted: built.append(build(wanted))
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
torch.manual_seed(0)
model = torchvision.models.resnet18().cuda().to(memory_format=torch.channels_last)
x = torch.randn(8, 3, 96, 96, device="cuda").contiguous(memory_format=torch.channels_last)
model = kalmannorm.convert(model, x[:2, :, :64, :64], statistics_batch_size=2)
if sys.argv[1] == "fused":
    model = kalmannorm.fuse(model, x[:2])
    assert not found, found
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        model(x).float().square().sum().backward()
torch.cuda.synchronize()
print(json.dumps([built, found]))
"""


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_kernels_are_built_together_once(way, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "KALMANNORM_BUILD_WORKERS": "4"}
    command = [sys.executable, "-c", STEP, way]

    def step():
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    (built,), found = step()
    assert built > 20
    late = {name for name, hit in found if not hit}
    assert late <= {"sum_over_groups_kernel"}  # with which Triton is tried out
    (built,), again = step()
    assert built == 0 and all(hit for _, hit in again)
