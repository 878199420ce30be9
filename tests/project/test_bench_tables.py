"""The tables of docs/performance.md are what the records of `kalmannorm bench` say."""

from __future__ import annotations

import re
import sys

import again
import graphed
import host
import measured
import pytest
import torch

from kalmannorm.lab.bench import inference, inference_model, op
from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.step import bench
from kalmannorm.lab.bench.step_contenders import Case, entries
from kalmannorm.lab.machine.origin import origin
from support.no_launches import no_launches
from support.wide import wide

CPU = torch.device("cpu")


def test_the_document_says_what_the_records_say():
    assert measured.records(), "there is a record at least of the CPU"
    text = measured.DOCUMENT.read_text(encoding="utf-8")
    assert measured.written(text) == text, "run python benchmarks/measured.py"


def test_loops_are_told_as_recorded():
    rows = measured.read(measured.RECORDS / "graphed-resnet101-h200.csv")
    text = measured.DOCUMENT.read_text(encoding="utf-8")
    told = text.split("A step of ResNet-101 with")[1].split("record](../benchmarks/records/graphed-resnet101")[0]
    ms = {(row["method"], row["way"]): f"{float(row['ms']):.1f}" for row in rows}
    ways = ("make_graphed_callables", "kalmannorm.graphed")
    expected = [ms[method, way] for way in ways for method in ("nn.BatchNorm", "bkn", "bkn fused")]
    assert re.findall(r"\d+\.\d", told) == expected


WAYS = ("nn.BatchNorm", "bkn", "bkn fused")


def recorded_steps(name):
    rows = measured.read(measured.RECORDS / name)
    return {" ".join(filter(None, (row["method"], row["way"]))): row for row in rows}


def line_of(by, words, column):
    """A line of a table on the page: a column of the record, for the three ways."""
    return " | ".join([f"| {words}", *(f"{float(by[way][column]):.1f}" for way in WAYS)]) + " |"


def test_steps_in_a_loop_are_told_as_recorded():
    by = recorded_steps("steps-resnet50-h200.csv")
    page = " ".join(measured.DOCUMENT.read_text(encoding="utf-8").split())
    columns = {"eager": "eager_ms", "compiled": "compiled_ms", "as a CUDA graph": "ms"}
    assert " ".join(line_of(by, words, column) for words, column in columns.items()) in page
    ratios = [f"{float(by[method]['eager_ratio']):.2f}" for method in WAYS[1:]]
    assert "takes {} times as long with BKN as with BatchNorm, and {} times with fused BKN".format(*ratios) in page


@pytest.mark.parametrize("net", ["ResNet-18", "ResNet-50"])
def test_compiled_steps_are_told_as_recorded(net):
    by = recorded_steps(f"steps-{net.lower().replace('-', '')}-h200.csv")
    lines = {
        f"{net}: a step, ms": "compiled_ms",
        "to compile, s": "compile_s",
        "to compile if torch finds its kernels on disk, s": "compile_cached_s",
    }
    page = " ".join(measured.DOCUMENT.read_text(encoding="utf-8").split())
    assert " ".join(line_of(by, words, column) for words, column in lines.items()) in page


def test_steps_of_reduce_overhead_are_told_as_recorded():
    by = recorded_steps("steps-resnet18-reduce-overhead-h200.csv")
    times = [f"{float(by[way]['compiled_ms']):.1f} ms" for way in WAYS]
    told = "takes {} with BatchNorm, {} with BKN and {} with fused BKN".format(*times)
    assert told in " ".join(measured.DOCUMENT.read_text(encoding="utf-8").split())


def test_loops_have_the_columns_of_their_record():
    rows = graphed.measure("digits-net", 4, CPU, 2)
    assert [row["method"] for row in rows] == ["nn.BatchNorm", "bkn", "bkn fused"] * 2
    recorded = measured.read(measured.RECORDS / "graphed-resnet101-h200.csv")
    assert [*rows[0], *origin()] == list(recorded[0])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RECORDS", tmp_path)
    return tmp_path


def norm_rows(measure, **options):
    cases = op.cases([(4, 8, 3, 3), (2, 8, 3, 3)], ["NHWC"], "float32", CPU, "2,N")
    return [row for case in cases for row in measure(case, 5, copy=1e9, **options)]


def test_of_one_norm(folder):
    rows = norm_rows(op.measure, inductor=False)
    for number, row in enumerate(rows):  # on so small a shape all of them would be 0
        row["copy_percent"], row["gb_per_s"] = 50.0 + number, 700.0 + number
    write_csv(folder / "op-here.csv", rows, origin())
    text = measured.written("before\n<!-- op-here.csv -->\nold\n<!-- end of op-here.csv -->\nafter")
    assert text.startswith("before\n") and text.endswith("after") and "\nold\n" not in text
    assert measured.written(text) == text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    head, _, first, second = lines
    bkn = {row["statistics_batch"]: row for row in rows if row["shape"] == "4x8x3x3" and row["contender"] == "BKN"}
    assert first[:2] == ["4×8×3×3", "NHWC"]
    assert first[head.index("BKN, m = 2")] == f"{bkn[2]['ratio']:.2f}"
    assert first[head.index("BKN, m = N, % of copy")] == f"{bkn['N']['copy_percent']:.0f}"
    assert second[head.index("BKN, m = 2")] == "–", "2 of 2 examples are all"
    assert not any("compiled" in cell for cell in head)


def test_of_inference_and_nets(folder):
    write_csv(folder / "inference-norm.csv", norm_rows(inference.measure), origin())
    case = Case(model="digits-net", gradient_batch=4, device=CPU)
    write_csv(folder / "inference-net.csv", inference_model.measure(case, 2, 5), origin())
    steps = bench(case, entries(4, [2], ["bkn"], fused=True), 5)
    write_csv(folder / "steps-net.csv", steps, origin())
    places = "".join(f"<!-- {path.name} -->\n<!-- end of {path.name} -->\n" for path in measured.records())
    text = measured.written(places)
    assert "| BKN example, m = 2 ÷ GroupNorm |" in text
    assert "| BKN population folded | " in text
    fused = steps[-1]
    assert f"| bkn fused | (4, 2) | {fused['ms']:.2f} | {fused['ratio']:.2f} | " in text
    assert f"{fused['peak_mib']:.0f} | {fused['peak_ratio']:.3f} |" in text


@pytest.mark.filterwarnings("ignore:kalmannorm", "ignore:ClosingPhase.step")  # nothing is computed
def test_of_host_time(folder, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels would really run")
    pytest.importorskip("triton")
    no_launches(monkeypatch)
    rows = host.measure(5)
    assert [row["norm"] for row in rows] == [norm.words for norm in host.norms()]
    for row in rows:
        assert row["forward_us"] > 0 and row["backward_us"] > 0
        assert (row["phase_us"] > 1) == ("settled" in row["norm"])
    shared = {"rounds": 5, "device": "cpu", "threads": 1, "load": 0.0}
    write_csv(folder / "host-here.csv", [row | shared for row in rows], origin())
    text = measured.written("first\n")
    assert f"| BKN | {rows[3]['forward_us']:.0f} | {rows[3]['backward_us']:.0f} | 0 | " in text


def test_a_new_record_comes_at_the_end_and_a_torn_place_is_said(folder):
    write_csv(folder / "op-here.csv", norm_rows(op.measure, inductor=False), origin())
    text = measured.written("first\n")
    assert text.startswith("first\n\n<!-- op-here.csv -->\nForward") and text.endswith("<!-- end of op-here.csv -->\n")
    assert measured.written(text) == text
    with pytest.raises(SystemExit, match=r"needs the lines <!-- op-here.csv --> and <!-- end of op-here.csv --> once"):
        measured.written("<!-- op-here.csv -->\n")


@wide
def test_a_record_is_taken_again_by_its_own_command(tmp_path, monkeypatch, capfd):
    own = "kalmannorm bench op --no-inductor --shape 2x4x3x3 --layout NCHW --rounds 5 --threads 1"
    records, output = tmp_path / "records", tmp_path / "again"
    records.mkdir()
    monkeypatch.setattr(again, "RECORDS", records)
    for name, command in (("op-mine.csv", own), ("op-not-mine-yet.csv", f"{own} --shape nonsense")):
        (records / name).write_text(f"us,command\n1.0,{command} -o records/old.csv\n")
    (records / "launches-mine.csv").write_text("us\n1.0\n")
    monkeypatch.setattr(sys, "argv", ["again.py", "mine", "-o", str(output)])
    with pytest.raises(SystemExit, match="not measured: op-not-mine-yet"):
        again.main()
    assert "op-mine.csv: measured" in capfd.readouterr().out
    assert [path.name for path in output.iterdir()] == ["op-mine.csv"]
    rows = measured.read(output / "op-mine.csv")
    assert {row["command"] for row in rows} == {own} and {row["shape"] for row in rows} == {"2x4x3x3"}


def test_every_record_of_the_gpu_names_its_command():
    names = {path.name for path in measured.RECORDS.glob("*-h200.csv")}
    told = {name for name in names if again.command_of(measured.RECORDS / name)}
    assert names - told == {"launches-h200.csv", "launches-both-h200.csv"}
