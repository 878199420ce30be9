"""Exported or turned back, a model gives the same answers: 20 families, and every way to ship a converted model.

Tests with a number are the demands of users: (14) folding and ONNX export, (15) the norm of a pretrained model swapped.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from kalmannorm import fold, freeze_priors, to_batchnorm
from support.nets_to_ship import net_and_input
from support.wide import narrow

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("deploy_check", ROOT / "benchmarks" / "deploy.py")
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

# torch's own, on its way to ONNX
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
EXPORTED = {"resnet", "resnetv2", "shufflenetv2", "starnet"}  # all are in the record: minutes


QUICK = [chosen for chosen in families.FAMILIES if chosen.family in ("resnet", "shufflenetv2")]


@pytest.mark.parametrize("chosen", narrow(families.FAMILIES, QUICK), ids=lambda chosen: chosen.family)
def test_14_15_families_keep_their_logits(chosen):
    row = families.examine(chosen, onnx=chosen.family in EXPORTED)
    assert not families.faults(row)
    assert 0 < row["folded"] <= row["norms"]


def test_14_15_the_record_of_all_families():
    with families.RECORD.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == [chosen.model for chosen in families.FAMILIES]
    assert len({row["family"] for row in rows}) == 20
    for row in rows:
        assert not families.faults(row)
        assert float(row["onnxruntime"]) <= families.LIMIT
        assert 0.3 < float(row["largest_logit"]) < 10
    worst = max(float(row[stage]) for row in rows for stage in ("fold", "onnxruntime"))
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert float(re.search(r"at\smost (\S+) of the largest", text)[1]) == worst


SHIPPED = {
    "folded": lambda: fold(net_and_input()[2]),
    "to_batchnorm": lambda: to_batchnorm(net_and_input()[2]),
    "weights-population": lambda: net_and_input(inference="population")[2],
    "learned-population": lambda: net_and_input(inference="population", transition="learned")[2],
    "weights-example": lambda: net_and_input(inference="example")[2],
    "weights-example-frozen": lambda: freeze_priors(net_and_input(inference="example")[2]),
    "learned-example": lambda: net_and_input(inference="example", transition="learned")[2],
}


def shipped(kind):
    """Away from its start: the learned prior too."""
    model = SHIPPED[kind]().eval()
    for name, parameter in model.named_parameters():
        if "transition.matrix" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    "kind", narrow(SHIPPED, ("folded", "learned-population", "weights-example", "learned-example"))
)
def test_14_onnx_export_with_a_dynamic_batch(kind, tmp_path):
    model, path = shipped(kind), tmp_path / "model.onnx"
    example = (torch.randn(2, 3, 8, 7),)
    torch.onnx.export(model, example, path, dynamo=True, dynamic_shapes=({0: "batch"},), verbose=False)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for N in (1, 3, 5):
        x = torch.randn(N, 3, 8, 7)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", narrow([False, True], [False]), ids=["non-strict", "strict"])
@pytest.mark.parametrize("kind", SHIPPED)
@pytest.mark.filterwarnings("ignore:.*side effects happened:UserWarning")  # posteriors that pass between norms
def test_14_torch_export_holds_no_trace_of_us(kind, strict):
    model = shipped(kind)
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(model, (torch.randn(2, 3, 8, 7),), dynamic_shapes=({0: batch},), strict=strict)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [target for target in targets if "kalmannorm" in target]
    assert not [target for target in targets if "autocast" in target or "set_grad" in target]
    for N in (1, 3, 5):
        x = torch.randn(N, 3, 8, 7)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_the_code_in_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert blocks
    model, x, _ = net_and_input(2)
    scope = {"model": model, "x": x}
    for block in blocks:
        exec(block, scope)
    for kind in ("plain", "folded", "program"):
        shipped = scope[kind].module() if kind == "program" else scope[kind]
        torch.testing.assert_close(shipped(x), model(x), rtol=1e-5, atol=1e-5)
    assert (tmp_path / "model.onnx").exists() and (tmp_path / "example.onnx").exists()
