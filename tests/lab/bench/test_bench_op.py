"""`kalmannorm bench op` and `bench inference`: every contender is what it says, and a wrong one is not timed."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from matplotlib.axes import Axes
from torch import nn
from torch.nn import functional as F

from kalmannorm._norms.kalman import BatchKalmanNorm2d
from kalmannorm.lab.bench import chart, comparing, copying, inference, inference_model, op, timing, truth
from kalmannorm.lab.bench.op_contenders import GhostByReshape, Inputs, contenders
from kalmannorm.lab.bench.step_contenders import Case as NetCase
from kalmannorm.lab.bench.timing import Direct, count_kernels
from kalmannorm.lab.bench.turns import Seconds
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.report import palette
from kalmannorm_command.app import run
from support.wide import wide

CPU = torch.device("cpu")
SHAPE = (6, 8, 3, 5)
SMALL = ["--shape", "6x8x3x5", "--rounds", "5", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setitem(comparing.SAMPLE, "cpu", 1e-4)
    monkeypatch.setitem(copying.BYTES, "cpu", 2**16)


def one(layout="NCHW", dtype="float32", **changes):
    (case,) = op.cases([SHAPE], [layout], dtype, CPU, "2,4,N", **changes)
    return case


def contenders_of(case):
    inputs = Inputs(case.shape, op.DTYPES[case.dtype], op.LAYOUTS[case.layout], CPU)
    layer = case.level == "layer"
    found = contenders(inputs, case.statistics_batches, relu=case.relu, layer=layer, inductor=False)
    return inputs, found


@pytest.mark.parametrize("layout", op.LAYOUTS)
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "bare"])
@pytest.mark.parametrize("level", op.LEVELS)
@pytest.mark.parametrize("dtype", op.DTYPES)
def test_all_contenders_are_right(dtype, level, relu, layout):
    rows = op.measure(one(layout, dtype, relu=relu, level=level), 5, copy=1e9, inductor=False)
    found = [(row["contender"], row["statistics_batch"]) for row in rows]
    # 4 does not divide 6, so there is no ghost by reshape; BKN has a smaller last group
    others = [("BatchNorm", "N"), ("GroupNorm", None), ("ghost by reshape", 2)]
    assert found == [*others, *((name, m) for name in ("BKN", "BKN settled") for m in (2, 4, "N"))]
    assert all(0 < row["error"] < (1e-5 if dtype == "float32" else 2e-2) for row in rows)


@wide
@pytest.mark.inductor
def test_a_compiled_batch_norm_takes_part():
    assert op.inductor_missing(CPU) is None
    rows = op.measure(one(), 5, copy=1e9, inductor=True)
    assert rows[1]["contender"] == "BatchNorm, inductor"
    assert rows[1]["ratio_inductor"] == 1.0
    assert all(row["ratio_inductor"] > 0 for row in rows)


def test_where_nothing_compiles_it_is_said(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    assert run(["bench", "op", *SMALL, "--json"]) == 0
    captured = capsys.readouterr()
    assert "inductor does not work here (no compiler)\n" in captured.err
    assert not any("inductor" in row["contender"] for row in json.loads(captured.out)["rows"])


def test_a_wrong_output_or_gradient_is_not_timed():
    inputs, found = contenders_of(one())
    for contender in found:
        expected, upstream = contender.truth(inputs.upstream)
        results = contender.step(upstream)()
        truth.check("it", results, expected)
        assert len(results) == len(expected) == (7 if "BKN" in contender.name else 4)
        for place, part in enumerate(truth.PARTS[: len(results)]):
            broken = [result.clone() for result in results]
            broken[place] *= 1.01
            with pytest.raises(LabError, match=f"it is wrong, so nothing is timed: {part} is off by"):
                truth.check("it", broken, expected)
            broken[place].fill_(torch.nan)
            with pytest.raises(LabError, match=part):
                truth.check("it", broken, expected)


def test_no_gradient_arrives_at_the_kink_of_a_relu():
    inputs, found = contenders_of(one(dtype="bf16"))
    for contender in found:
        (y, *_), upstream = contender.truth(inputs.upstream)
        stopped = (upstream == 0) & (inputs.upstream != 0)
        assert 0 < stopped.float().mean() < 0.1
        assert (y[stopped] <= 0.05).all()
        assert torch.equal(upstream[~stopped], inputs.upstream[~stopped])
    inputs, (contender, *_) = contenders_of(one(relu=False))
    assert torch.equal(contender.truth(inputs.upstream).upstream, inputs.upstream)


def test_a_contender_that_is_wrong_stops_the_run(monkeypatch, capsys):
    forward = GhostByReshape.forward
    monkeypatch.setattr(GhostByReshape, "forward", lambda self, x: 1.1 * forward(self, x))
    assert run(["bench", "op", *SMALL, "--no-inductor"]) == 2
    captured = capsys.readouterr()
    assert "ghost by reshape (m = 2) at 6x8x3x5 NHWC float32 is wrong, so nothing is timed" in captured.err
    assert "BatchNorm" not in captured.out, "no number of a case is shown where one of its contenders is wrong"


def test_ghost_by_reshape_is_batch_norm_on_strided_groups():
    x = torch.randn(6, 4, 3, 3)
    ghost = GhostByReshape(nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4)), 3, track=False)
    for group in range(3):
        torch.testing.assert_close(ghost(x)[group::3], F.batch_norm(x[group::3], None, None, training=True))


def test_layers_move_their_statistics_and_ops_have_none(monkeypatch):
    seen = []
    track = BatchKalmanNorm2d._track_batch
    monkeypatch.setattr(BatchKalmanNorm2d, "_track_batch", lambda self, *given: seen.append(1) or track(self, *given))
    for level, updated in (("layer", True), ("op", False)):
        seen.clear()
        inputs, found = contenders_of(one(level=level))
        found[-1].step(inputs.upstream)()
        assert bool(seen) == updated


def test_bytes_are_those_of_the_algorithm(monkeypatch):
    def clock(timers, rounds, watch):
        return {name: [Seconds(1e-6)] * rounds for name in timers}

    monkeypatch.setattr(comparing, "take_turns", clock)
    size = 4 * torch.Size(SHAPE).numel()
    for layout, ghost in (("NCHW", 13), ("NHWC", 15)):
        rows = {row["contender"]: row for row in op.measure(one(layout), 5, copy=1e9, inductor=False)}
        for name, passes in (
            ("BatchNorm", 13),
            ("GroupNorm", 13),
            ("ghost by reshape", ghost),
            ("BKN", 8),
            ("BKN settled", 5),
        ):
            assert rows[name]["passes"] == passes
            assert rows[name]["gb_per_s"] == round(passes * size / 1e-6 / 1e9, 1)
            assert rows[name]["copy_percent"] == pytest.approx(100 * rows[name]["gb_per_s"], abs=6)
    rows = op.measure(one(relu=False), 5, copy=1e9, inductor=False)
    assert {(row["passes"], row["contender"] == "BKN settled") for row in rows} == {(8, False), (5, True)}


def test_a_sample_is_long_enough_and_a_second_is_of_one_call(monkeypatch):
    now = {"clock": 0.0, "processor": 0.0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now["clock"])
    monkeypatch.setattr(timing.time, "process_time", lambda: now["processor"])

    def call():
        now["clock"] += 0.25
        now["processor"] += 0.5
        return (torch.zeros(()),)

    ready = Direct(call, CPU, 1.6)
    assert ready.repeats == 7, "as many as take 1.6 s"
    assert ready.seconds() == Seconds(0.25, 0.5)
    assert Direct(call, CPU, 0.0).repeats == 1
    assert count_kernels(call, CPU) is None


def test_a_copy_is_measured():
    assert 1e6 < copying.copy_speed(CPU) < 1e13


@pytest.mark.parametrize("layout", op.LAYOUTS)
@pytest.mark.parametrize("dtype", op.DTYPES)
def test_inference_of_one_norm(dtype, layout):
    for relu in (True, False):
        rows = inference.measure(one(layout, dtype, relu=relu), 5, copy=1e9)
        assert [row["contender"] for row in rows[:3]] == ["BatchNorm", "BKN population", "GroupNorm"]
        assert [row["statistics_batch"] for row in rows[3:]] == [2, 4, "N"]
        assert rows[2]["ratio_groupnorm"] == 1.0


def test_a_norm_that_asks_its_neighbours_is_not_timed_as_example(monkeypatch):
    forward = BatchKalmanNorm2d._forward_example
    monkeypatch.setattr(
        BatchKalmanNorm2d, "_forward_example", lambda self, x, *rest: forward(self, x.roll(1, 0), *rest)
    )
    with pytest.raises(LabError, match=r"BKN example at .* is wrong, so nothing is timed: output"):
        inference.measure(one(), 5, copy=1e9)


def test_inference_of_a_net(monkeypatch):
    case = NetCase(model="digits-net", gradient_batch=8, device=CPU)
    rows = inference_model.measure(case, 2, 5, fused=True)
    assert [row["contender"] for row in rows] == [
        "BatchNorm folded",
        "BatchNorm",
        "BKN population folded",
        "BKN population",
        "GroupNorm",
        "BKN example",
        "BKN example fused",
    ]
    assert (rows[0]["ratio"], rows[4]["ratio_groupnorm"]) == (1.0, 1.0)
    fold = inference_model.fold
    monkeypatch.setattr(inference_model, "fold", lambda *given: _disturbed(fold(*given)))
    with pytest.raises(LabError, match=r"BatchNorm folded is wrong, so nothing is timed: its logits are off by"):
        inference_model.measure(case, 2, 5)


def _disturbed(net):
    with torch.no_grad():
        next(net.parameters()).mul_(1.1)
    return net


@pytest.mark.parametrize("command", ["op", "inference"])
def test_command(command, tmp_path, capsys):
    record, plot = tmp_path / "bench.csv", tmp_path / "bench.png"
    arguments = ["bench", command, *SMALL, "--shape", "4x8x3x5", "--layout", "NHWC"]
    if command == "op":
        arguments += ["--no-inductor", "--level", "op", "--no-relu", "--statistics-batches", "2,N"]
    assert run([*arguments, "--out", str(record), "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["shape"] for row in found["rows"]} == {"6x8x3x5", "4x8x3x5"}
    with record.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, same in zip(rows, found["rows"], strict=True):
        assert {key: row[key] for key in same} == {key: "" if v is None else str(v) for key, v in same.items()}
        assert {"hardware", "threads", "torch", "commit", "command"} <= row.keys()
        assert float(row["us_p20"]) <= float(row["us"]) <= float(row["us_p80"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert run(arguments) == 0
    assert "% copy" in capsys.readouterr().out


def test_command_of_a_net(capsys):
    assert run(["bench", "inference", "--model", "digits-net", "--batch", "4", "--rounds", "5", "--device", "cpu"]) == 0
    assert "BKN population folded" in capsys.readouterr().out


def test_bars_are_the_ratios_in_the_colours_of_the_report(monkeypatch):
    rows = [row for layout in op.LAYOUTS for row in op.measure(one(layout), 5, copy=1e9, inductor=False)]
    drawn = {}
    bar = Axes.bar

    def watched(ax, x, y, width, *, label, color, **options):
        drawn.setdefault(label, []).append((list(y), color))
        return bar(ax, x, y, width, label=label, color=color, **options)

    monkeypatch.setattr(Axes, "bar", watched)
    made = chart.draw(rows, "title", panel="layout", place="shape", line=("contender", "statistics_batch"))
    assert made["png"].startswith(b"\x89PNG") and b"ghost by reshape 2" in made["svg"]
    own = [row["ratio"] for row in rows if (row["contender"], row["statistics_batch"]) == ("BKN", 2)]
    assert [y for y, _ in drawn["BKN 2"]] == [[ratio] for ratio in own], "a panel per layout"
    named = {"BKN 2": "bkn", "BatchNorm N": "bn", "GroupNorm": "gn"}
    for label, index in zip(named, palette.colours(list(named.values())), strict=True):
        assert drawn[label][0][1] == palette.LIGHT[index]
    assert len({found[0][1] for found in drawn.values()}) == len(drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op", "--shape", "8x64x24"], "give examples, channels, height, width, such as 32x256x56x56"),
        (["op", "--shape", "8x0x24x24"], "give examples, channels, height, width"),
        (["op", "--layout", "NHCW"], "unknown layout 'NHCW'; did you mean 'NHWC'"),
        (["op", "--dtype", "float16"], "unknown dtype 'float16'"),
        (["op", "--level", "net"], "unknown level 'net'"),
        (["op", "--statistics-batches", "2,all"], "give numbers of examples, or N for all, such as 2,N"),
        (["op", "--statistics-batches", "16"], "6x8x3x5 has 6 examples; give N for all"),
        (["op", "--rounds", "1"], "from 5"),
        (["op", "--plot", "a.pdf"], "must end in .png or .svg"),
        (["inference", "--statistics-batches", "0"], "give numbers of examples"),
        (["inference", "--model", "cifar-inceptoin"], "did you mean 'cifar-inception'"),
        (["inference", "--model", "digits-net", "--precision", "half"], "choose float32 or bf16"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert run(["bench", arguments[0], *SMALL, *arguments[1:]]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_a_mistyped_bench_is_not_taken_for_a_step(capsys):
    assert run(["bench", "opp"]) == 2
    assert "o such command 'opp'" in capsys.readouterr().err
