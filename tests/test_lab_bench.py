"""`kalmannorm bench`: nothing wrong is timed, peaks are counted to the byte, ratios are those of one run."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from torch import nn

from kalmannorm.cli.app import run
from kalmannorm.grouped import GroupedNorm
from kalmannorm.lab import bench as lab_bench
from kalmannorm.lab.bench import BASELINE, Case, Contender, Seconds, bench, check, measured
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.methods import METHODS
from kalmannorm.lab.peak import peak_bytes
from kalmannorm.lab.setting import Setting

CPU = torch.device("cpu")
CASE = Case(model="digits-net", setting=Setting(8, 2), device=CPU)
SMALL = ["bench", "--model", "digits-net", "--setting", "8,2", "--rounds", "5", "--device", "cpu"]


def contender(name, case=CASE):
    return Contender(name, case.build(name), *case.batch())


@pytest.mark.parametrize("layout", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", [BASELINE, *METHODS])
def test_every_method_passes_the_check_and_is_not_touched_by_it(name, layout):
    case = Case(model="digits-net", setting=Setting(8, 2), device=CPU, channels_last=layout)
    one = contender(name, case)
    before = {key: value.clone() for key, value in one.model.state_dict().items()}
    check(case, one)
    assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())
    assert one.images.is_contiguous(memory_format=torch.channels_last) == layout or case.shape[0] == 1


@pytest.mark.filterwarnings("ignore:kalmannorm. a batch with NaN")
def test_a_loss_that_is_no_number_is_not_timed():
    one = contender("bkn")
    nn.init.constant_(next(one.model.parameters()), torch.nan)
    with pytest.raises(LabError, match="bkn is wrong, so nothing is timed: its loss is not a number"):
        check(CASE, one)


def test_a_missing_gradient_is_not_timed():
    one = contender("bn")
    one.model.spare = nn.Parameter(torch.zeros(3))
    with pytest.raises(LabError, match="spare has no gradient"):
        check(CASE, one)


def test_groups_that_depend_on_each_other_are_not_timed():
    one = contender("bkn")
    for module in one.model.modules():
        if isinstance(module, GroupedNorm):
            module.statistics_batch_size = 4
    with pytest.raises(LabError, match=r"bkn is wrong.*its groups depend on each other"):
        check(CASE, one)


def test_a_baseline_that_is_no_batch_norm_is_not_timed():
    one = contender(BASELINE)
    for module in one.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1.0
    with pytest.raises(LabError, match=r"with one group its loss is not that of nn.BatchNorm: off by"):
        check(CASE, one)


def test_peaks_are_counted_to_the_byte():
    def step():
        x = torch.ones(1000)  # 4000 bytes
        y = x.neg()  # 8000
        del x
        z = y.neg()  # 8000
        return z.double().neg()  # y and z, and twice 8000

    held = [torch.zeros(500), torch.zeros(500)]
    assert peak_bytes(step, held, CPU) == 2 * 2000 + 8000 + 16000
    assert peak_bytes(step, [held[0], held[0][:7].view(7, 1)], CPU) == 2000 + 24000, "one storage counts once"


def test_peaks_are_the_same_every_time_and_grow_with_the_batch():
    one = contender("bkn")
    one.step()
    assert one.peak() == one.peak()
    large = contender("bkn", Case(model="digits-net", setting=Setting(16, 2), device=CPU))
    large.step()
    assert large.peak() > 1.2 * one.peak()


def test_contenders_take_turns_and_warm_up_out_of_the_clock():
    order = []

    class Clock:
        def __init__(self, name):
            self.name = name

        def seconds(self):
            order.append(self.name)
            return float(len(order))

    times = measured([Clock("a"), Clock("b")], 3, lambda _: None)
    warm = 2 * lab_bench.WARMUP
    assert order[warm:] == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [warm + 1, warm + 4, warm + 5], "b": [warm + 2, warm + 3, warm + 6]}


def test_ratios_are_of_the_same_round(monkeypatch):
    noise = [1, 10, 100, 2, 1]
    times = {name: [Seconds(a * n, b * n) for n in noise] for name, a, b in ((BASELINE, 1, 1), ("gn", 2, 3))}
    monkeypatch.setattr(lab_bench, "measured", lambda *_: times)
    base, gn = bench(CASE, ["gn"], 5)
    assert (base["ratio"], gn["ratio"], gn["ratio_p80"], gn["processor_ratio"]) == (1.0, 2.0, 2.0, 3.0)
    assert (base["peak_ratio"], base["method"]) == (1.0, BASELINE)
    assert gn["peak_mib"] > 0


def test_command(tmp_path, capsys):
    output = tmp_path / "bench.csv"
    assert run([*SMALL, "--methods", "bn,bkn", "--output", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found["rows"]] == [BASELINE, "bn", "bkn"]
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, same in zip(rows, found["rows"], strict=True):
        assert {key: row[key] for key in same} == {key: "" if v is None else str(v) for key, v in same.items()}
        assert {"hardware", "threads", "torch", "commit", "command"} <= row.keys()
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
    assert run([*SMALL, "--methods", "gn"]) == 0
    assert "peak MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "bkm"], "unknown method 'bkm'; did you mean 'bkn'"),
        (["--setting", "8,3"], "does not divide the gradient batch 8"),
        (["--model", "cifar-inceptoin"], "did you mean 'cifar-inception'"),
        (["--rounds", "2"], "at least 5"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--output", "."], "is a folder: name a file"),
        (["--output", "pyproject.toml/bench.csv"], "cannot write pyproject.toml/bench.csv"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert run([*SMALL, *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]
