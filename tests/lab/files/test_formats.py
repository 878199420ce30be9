"""Files that users have on disk are read by the code of today, with the numbers that they had: see `artefacts/make.py`.

And what a later version wrote is refused in a line that says so.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from artefacts.make import EXECUTION, NORMS, RECIPE, net, outputs
from kalmannorm import BatchKalmanNorm2d
from kalmannorm._running import relay
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.files.records import Run, read_json
from kalmannorm.lab.training.loading import load_run
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from support.lab_runs import numbers, weights

STORED = Path(__file__).parents[2] / "artefacts" / "format0"
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Other processors and other versions of torch round sums differently."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Path(shutil.copytree(STORED / "finished", tmp_path_factory.mktemp("format0") / "finished"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = Path(shutil.copytree(STORED / "interrupted", tmp_path_factory.mktemp("format0") / "interrupted"))
    train(RECIPE, folder, EXECUTION, resume=True)
    return folder


def test_a_stored_run_is_read(finished):
    found = Run.read(finished)
    assert found.recipe == RECIPE and found.execution.save_every == 2 and found.result["steps"] == 6
    assert len(found.events("train")) == 6


def test_a_stored_run_evaluates_to_the_same(capsys, finished):
    assert run(["evaluate", str(finished), "--device", "cpu", "--json"]) == 0
    found, stored = json.loads(capsys.readouterr().out), read_json(STORED / "finished" / "evaluation.json")
    assert found.pop("scores") == {
        mode: {name: pytest.approx(value, rel=1e-4) for name, value in scores.items()}
        for mode, scores in stored.pop("scores").items()
    }
    assert found == stored


def test_a_stored_run_is_resumed_to_the_same_end(resumed):
    ended, stored = weights(resumed), weights(STORED / "finished")
    assert ended.keys() == stored.keys()
    for name, tensor in stored.items():
        upgraded = tensor.reshape(1) if tensor.dim() == 0 and name.endswith(("gain_logit", "noise")) else tensor
        torch.testing.assert_close(ended[name], upgraded, **CLOSE)
    assert [event["step"] for event in numbers(resumed)] == [event["step"] for event in numbers(STORED / "finished")]
    assert Run.read(resumed).result["accuracy"] == read_json(STORED / "finished" / "result.json")["accuracy"]


def test_a_stored_log_that_was_emptied(tmp_path):
    """Of format 0, whose checkpoints know the size of the log and no digest."""
    folder = Path(shutil.copytree(STORED / "interrupted", tmp_path / "run"))
    (folder / "log.jsonl").write_text("")
    with pytest.raises(LabError, match=r"log\.jsonl is damaged \(it has 0 bytes instead of .* before step-00000004\)"):
        train(RECIPE, folder, EXECUTION, resume=True)


@pytest.mark.parametrize("name", NORMS)
def test_stored_state_dicts(name):
    """They have torch's version 2, and none where they went through safetensors."""
    stored = torch.load(STORED / "nets.pt", weights_only=True)
    x, (state, expected) = stored["x"], stored["nets"][name].values()
    for given in (state, dict(state)):
        model = net(NORMS[name])
        model.load_state_dict(given)
        assert all(torch.equal(tensor, state[key].reshape(tensor.shape)) for key, tensor in model.state_dict().items())
        found = outputs(model, x)
        assert found.keys() == expected.keys()
        for mode in expected:
            torch.testing.assert_close(found[mode], expected[mode], **CLOSE)


def test_a_stored_pickle_says_what_to_do():
    with pytest.raises(ModuleNotFoundError, match=r"another version .* load it into a freshly converted model"):
        torch.load(STORED / "model.pt", weights_only=False)


def test_weights_keep_the_versions_of_their_modules(resumed):
    with safe_open(resumed / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["kalmannorm"])
        assert file.metadata()["format"] == "pt" and about["format"] == 1
    assert about["modules"]["features.1.norm"] == {"version": BatchKalmanNorm2d._version}


def test_a_later_version_of_a_norm_is_refused(resumed, monkeypatch):
    model = net(NORMS["ghost"])
    state = model.state_dict()
    state._metadata["1"]["version"] = 102
    expected = "'1' was saved with version 102 of its norm, and this kalmannorm knows versions up to 101: update"
    with pytest.raises(RuntimeError, match=expected):
        model.load_state_dict(state, strict=False)
    monkeypatch.setattr(BatchKalmanNorm2d, "_version", 100)
    with pytest.raises(LabError, match="version 101 of its norm, and this kalmannorm knows versions up to 100"):
        load_run(resumed, device="cpu")


def test_weights_of_a_later_format_are_refused(resumed, monkeypatch, tmp_path):
    model = load_run(resumed, device="cpu").model
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 2)
        (tmp_path / "model.safetensors").write_bytes(checkpoint.weights(model))
    with pytest.raises(LabError, match="has format 2, but this version of kalmannorm reads formats up to 1: update"):
        checkpoint.load_weights(tmp_path / "model.safetensors", model)


@pytest.mark.parametrize("name", ["_ranks", "statistics_batch_size", "wire.first", "skipped_batches"])
def test_a_pickle_that_lacks_something(name):
    """As one of an older version does: said when it is loaded, not by an AttributeError in a forward."""
    model = net(NORMS["kalman-weights"])
    norm = model[4]
    if name == "wire.first":
        del norm.wire.__dict__["first"]
    elif name == "skipped_batches":
        del norm._buffers[name]
    else:
        del norm.__dict__[name]
    written = pickle.dumps(model)
    with pytest.raises(ValueError, match=f"has no '{name.split('.')[-1]}': another version of kalmannorm") as error:
        pickle.loads(written)
    assert "load it into a freshly converted model" in str(error.value) and "\n" not in str(error.value)


def test_a_pickle_whose_classes_have_moved():
    written = pickle.dumps(net(NORMS["kalman-weights"]), protocol=0)
    older = written.replace(b"kalmannorm._running.wires\nWire", b"kalmannorm._running.relay\nWire")
    assert older != written
    with pytest.raises(ImportError, match=r"another version .* load it into a freshly converted model"):
        pickle.loads(older)
    assert not hasattr(relay, "other")


def test_a_pickle_of_a_later_version(monkeypatch):
    model = net(NORMS["renorm"])
    with monkeypatch.context() as later:
        later.setattr(type(model[1]), "_version", 102)
        written = pickle.dumps(model)
    with pytest.raises(ValueError, match="version 102, and this kalmannorm knows versions up to 101: update"):
        pickle.loads(written)


def test_copies_hold_no_version_of_their_own():
    copied = copy.deepcopy(net(NORMS["ghost"]))
    assert "_version" not in vars(copied[1])
