"""Whole models of timm and torchvision: sources as autograd tells them, counts as recorded, a training step that works.

A small selection on small images; `make families` does it for every family, and its record is held to its targets here.
"""

import csv
import sys
import warnings
from pathlib import Path

import pytest
import torch

import kalmannorm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import family_checks as checks  # noqa: E402
import family_models as models  # noqa: E402
import family_table as table  # noqa: E402

from support.wide import narrow  # noqa: E402

MODELS = {
    "test_resnet": 64,
    "test_efficientnet": 64,  # squeeze and excitation
    "ghostnet_050": 64,
    "legacy_seresnet18": 64,
    "skresnet18": 64,  # norms behind a global average, softmax between branches
    "res2next50": 64,  # chunks of channels, one fed by the other
    "hrnet_w18_small": 64,  # sums over four resolutions
    "densenet121": 64,
    "googlenet": 64,  # Inception, with heads that run in training only
    "shufflenet_v2_x0_5": 64,  # channels shuffled and split
    "mobilevit_xxs": 64,
    "levit_128s": 224,  # transformer whose norms are BatchNorms; a fixed size
    "tiny_vit_5m_224": 64,  # torch.fx cannot trace it
    "efficientvim_m1": 64,  # state space: matrix products of features, gates around residuals
}
PRIORS = ("test_resnet", "test_efficientnet", "googlenet", "efficientvim_m1")

with (ROOT / "benchmarks" / "records" / "families.csv").open(newline="") as file:
    RECORD = list(csv.DictReader(file))


def built(name):
    row = next(row for row in RECORD if row["model"] == name)
    torch.manual_seed(0)
    chosen = models.Chosen(row["library"], row["family"], name)
    return row, models.build(chosen)


def images(number, size):
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own code
        yield


QUICK = ("test_resnet", "test_efficientnet", "shufflenet_v2_x0_5", "efficientvim_m1")


@pytest.mark.parametrize("name", narrow(MODELS, QUICK))
def test_sources_counts_and_step(name):
    row, model = built(name)
    two, four = images(2, MODELS[name]), images(4, MODELS[name])
    expected = checks.fed_by(model, two[:1])
    for transition in ("weights", "learned"):
        converted = kalmannorm.convert(model, two, transition=transition, statistics_batch_size=2)
        wiring = kalmannorm.wiring(converted)
        assert checks.differences(expected, wiring) == []
        fed = [norm for norm in wiring.norms if norm.sources]
        assert (len(wiring.norms), len(fed)) == (int(row["norms"]), int(row["fed"]))
        assert sum(norm.wired for norm in fed) == int(row[transition])
        assert checks.step_faults(converted, four) == []


@pytest.mark.parametrize("name", narrow(PRIORS, ("test_resnet", "efficientvim_m1")))
def test_priors_are_near_what_is_observed(name):
    _, model = built(name)
    four = images(4, 128)
    converted = kalmannorm.convert(model, four[:2], gain=0.999)
    found = checks.summary(checks.priors(converted, four))
    assert found.correlated > 0 and found.correlation >= checks.CORRELATION
    assert checks.RATIO[0] <= found.ratio <= checks.RATIO[1]
    assert found.within > 0.8


def test_the_oracle_finds_what_feeds_what():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (torch.nn.BatchNorm1d(4) for _ in range(4))

        def forward(self, x):
            a = self.a(x)
            b = self.b(a.relu())
            c = self.c(a + 0 * b)  # a product with nothing lets no gradient through
            return self.d(c.detach() + b)

    found = checks.fed_by(Net(), torch.randn(8, 4))
    assert found == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b"}}


def test_the_record_meets_its_targets():
    assert len({row["family"] for row in RECORD if row["library"] == "timm"}) >= 58
    shares = table.shares(RECORD)
    assert shares["learned"] >= table.LEARNED and shares["weights"] >= table.WEIGHTS
    assert [row["model"] for row in RECORD if row["sources"] != "equal" or row["step"] != "fine"] == []
    unexplained = [row["model"] for row in RECORD if not table.reaches(row) and row["model"] not in table.WHY]
    assert unexplained == []


def test_the_document_is_that_of_the_record():
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == table.document(RECORD)
