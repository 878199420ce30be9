"""`kalmannorm export`: what was written gives the run's own logits; what cannot be written is said in one line."""

from __future__ import annotations

import importlib.util
import json
from functools import partial

import onnx
import onnxruntime
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from kalmannorm import fold
from kalmannorm._model.settings import set_inference
from kalmannorm.lab import export as lab_export
from kalmannorm.lab import models
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.export import export, exported
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.loading import load_run
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run

EXECUTION = Execution(device="cpu", tensorboard=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By method: the folder of a run that was trained for a few steps."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    for method in ("bkn", "bn", "brn", "gn"):
        recipe = Recipe(
            method=method, gradient_batch=16, epochs=1, train_examples=64, test_examples=8, channels_last=method == "bn"
        )
        train(recipe, folder / method, EXECUTION)
    return folder


def own_logits(folder, inference, count):
    loaded = load_run(folder, device="cpu", workers=0)
    if any(hasattr(module, "inference") for module in loaded.model.modules()):
        set_inference(loaded.model, inference)
    images = torch.cat([images for images, _ in loaded.data.test_batches(8)])[:count]
    with torch.no_grad():
        return images, loaded.model(images)


def onnx_logits(path, images):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """A run in population inference, in every format; and what `export` said."""
    folder = tmp_path_factory.mktemp("files")
    return folder, {name: export(runs / "bkn", folder / f"model.{name}") for name in ("onnx", "pt2", "safetensors")}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "inference", "kind"),
    [
        ("bkn", "example", "onnx"),
        ("bkn", "batch", "pt2"),
        ("bn", "population", "pt2"),  # channels_last in training
        ("brn", "population", "pt2"),
        ("gn", "population", "pt2"),
    ],
)
def test_programs_give_the_logits_of_the_run(runs, tmp_path, method, inference, kind):
    path = tmp_path / f"model.{kind}"
    found = export(runs / method, path, inference=inference)
    assert found["difference"] < 1e-5
    group = 2 if inference == "batch" else 1
    assert found["batch"] == {"multiple_of": group, "at_least": 2 * group if inference == "batch" else 1}
    assert list(tmp_path.iterdir()) == [path]
    program = torch.export.load(path).module() if kind == "pt2" else partial(onnx_logits, path)
    for count in (4, 8):
        images, expected = own_logits(runs / method, inference, count)
        close(program(images), expected)


def test_population_inference_leaves_no_norm_and_any_batch(runs, files, tmp_path):
    folder, said = files
    graph = onnx.load(folder / "model.onnx").graph
    assert not {"BatchNormalization", "Sqrt", "Reciprocal"} & {node.op_type for node in graph.node}
    for count in (1, 8):
        images, expected = own_logits(runs / "bkn", "population", count)
        close(onnx_logits(folder / "model.onnx", images), expected)
        close(torch.export.load(folder / "model.pt2").module()(images), expected)
    for found in said.values():
        assert (found["norms"], found["batch"]) == (0, {"multiple_of": 1, "at_least": 1})
        assert found["difference"] < 1e-5
    assert export(runs / "bkn", tmp_path / "model.safetensors", folded=False)["norms"] > 0


def test_the_file_says_what_it_is(runs, files):
    """Normalization above all: who gets the file has to do it."""
    folder, _ = files
    data = load_run(runs / "bkn", device="cpu", workers=0).data
    (entry,) = (entry for entry in onnx.load(folder / "model.onnx").metadata_props if entry.key == "kalmannorm")
    inside = {"kalmannorm.json": ""}
    torch.export.load(folder / "model.pt2", extra_files=inside)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        texts = [entry.value, inside["kalmannorm.json"], file.metadata()["kalmannorm"]]
    for about in map(json.loads, texts):
        assert (about["model"], about["inference"], about["shape"]) == ("digits-net", "population", [1, 8, 8])
        close(torch.tensor(about["mean"]), data.mean.flatten())
        close(torch.tensor(about["std"]), data.std.flatten())


@pytest.mark.parametrize("folded", [True, False])
def test_weights_load_into_a_plain_model(runs, tmp_path, folded):
    export(runs / "bkn", tmp_path / "model.safetensors", folded=folded)
    images, expected = own_logits(runs / "bkn", "population", 8)
    plain = models.build("digits-net", classes=10, shape=(1, 8, 8)).eval()
    if folded:
        plain = fold(plain, images)
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    close(plain(images), expected)


class Choosy(nn.Module):
    """Other code for every number of images: no program can take them all."""

    def forward(self, x):
        return x * x.shape[0] if x.shape[0] == 2 else x.flip(0)


def test_a_batch_that_cannot_vary_is_fixed():
    program, batch = exported(Choosy(), torch.ones(2, 3))
    assert batch == 2
    assert torch.equal(program.module()(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_a_model_that_cannot_be_followed_is_one_line():
    class Looks(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(LabError, match=r"torch.export cannot follow this model: .+") as caught:
        exported(Looks(), torch.ones(2, 3))
    assert "\n" not in str(caught.value)


def test_wrong_logits_are_not_kept(runs, tmp_path, monkeypatch, capsys):
    """Neither the new file nor a part of it; what was there before stays."""
    output = tmp_path / "model.pt2"
    output.write_text("what was there")
    right = lab_export.shipped

    def wrong(*args, **options):
        model = right(*args, **options)
        nn.init.ones_(next(model.parameters()))
        return model

    monkeypatch.setattr(lab_export, "shipped", wrong)
    assert run(["export", str(runs / "bkn"), "-o", str(output)]) == 2
    assert "of the largest, so nothing was written" in capsys.readouterr().err
    assert output.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [output]


def test_command(runs, tmp_path, capsys):
    output = tmp_path / "model.pt2"
    assert run(["export", str(runs / "gn"), "-o", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(output)
    assert found["bytes"] == output.stat().st_size
    assert run(["export", str(runs / "bkn"), "-o", str(output)]) == 0
    text = capsys.readouterr().out
    assert "takes any number of images of 1 × 8 × 8" in text
    assert "logits differ from the model's by at most" in text


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("bkn", ["-o", "model.tflite"], "must end in .onnx, .pt2, .safetensors"),
        ("bkn", ["-o", "nowhere/model.onnx"], "there is no folder nowhere"),
        ("bkn", ["-o", "model.safetensors", "--inference", "example"], "use .onnx or .pt2"),
        ("bkn", ["-o", "model.onnx", "--inference", "none"], "BKN has no none inference; it has population"),
        ("gn", ["-o", "model.onnx", "--inference", "batch"], "GN has no batch inference; it has population"),
        ("nothing", ["-o", "model.onnx"], "nothing"),
    ],
)
def test_mistakes_are_one_line(runs, tmp_path, monkeypatch, capsys, method, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(["export", str(runs / method), *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["onnxscript", "onnxruntime"])
def test_without_onnx_or_its_runtime(runs, tmp_path, monkeypatch, capsys, missing):
    """Without the exporter nothing can be written; without the runtime it is, and not compared."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    status = run(["export", str(runs / "bkn"), "-o", str(tmp_path / "model.onnx")])
    said = capsys.readouterr()
    if missing == "onnxscript":
        assert status == 2
        assert "ONNX needs onnxscript: pip install 'kalmannorm[onnx]'" in said.err
    else:
        assert status == 0
        assert "not compared: onnxruntime is missing" in said.out
