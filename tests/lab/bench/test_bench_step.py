"""`kalmannorm bench step`: nothing wrong is timed, peaks are counted to the byte, ratios are those of one run."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from torch import nn

from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._ops.normalize.native_settled import NativeSettledAlone
from kalmannorm.lab.bench import step
from kalmannorm.lab.bench.step import bench
from kalmannorm.lab.bench.step_checks import check, check_replay
from kalmannorm.lab.bench.step_compiled import TIMES_CACHED
from kalmannorm.lab.bench.step_contenders import BASELINE, NONE, Case, Contender, Entry, entries
from kalmannorm.lab.bench.turns import WARMUP, Seconds, take_turns
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.machine.peak_memory import peak_bytes
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm_command.app import run

CPU = torch.device("cpu")
CASE = Case(model="digits-net", gradient_batch=8, device=CPU)
SMALL = ["bench", "--model", "digits-net", "--setting", "8,2", "--rounds", "5", "--device", "cpu"]


def contender(name, case=CASE, way="", *, settled=False):
    size = case.gradient_batch if name == BASELINE else 2
    entry = Entry(name, Setting(case.gradient_batch, size), way, settled)
    return Contender(case, entry, case.build(entry), *case.batch())


@pytest.mark.parametrize("layout", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", [BASELINE, *METHODS])
def test_every_method_passes_the_check_and_is_not_touched_by_it(name, layout):
    case = Case(model="digits-net", gradient_batch=8, device=CPU, channels_last=layout)
    one = contender(name, case)
    before = {key: value.clone() for key, value in one.model.state_dict().items()}
    check(case, one)
    assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())
    assert one.images.is_contiguous(memory_format=torch.channels_last) == layout or case.shape[0] == 1


def test_fused_nets_are_fused_and_pass():
    one = contender("bkn", way="fused")
    assert len(one.model.fusion.fused) > 0
    check(CASE, one)


@pytest.mark.parametrize("way", ["", "fused"])
@pytest.mark.parametrize("name", ["bn", "bn-ws", "bkn", "bkn-ws", "bkn-learned"])
def test_settled_nets_run_with_running_statistics_and_pass(name, way):
    one = contender(name, way=way, settled=True)
    norms = [module for module in one.model.modules() if isinstance(module, GroupedNorm)]
    assert norms and all(norm.runs_settled() for norm in norms)
    assert all(norm.closing.fades == name.startswith("bkn") for norm in norms)
    before = [norm.closing.averages.clone() for norm in norms]
    check(CASE, one)
    assert all(torch.equal(norm.closing.averages, old) for norm, old in zip(norms, before, strict=True))
    one.step()
    assert not any(torch.equal(norm.closing.averages, old) for norm, old in zip(norms, before, strict=True))


def test_a_wrong_settled_net_is_not_timed():
    one = contender("bkn", settled=True)
    for module in one.model.modules():
        if isinstance(module, GroupedNorm):
            module.running_var.mul_(1.1)
    with pytest.raises(LabError, match=r"bkn \(8, 2\) settled is wrong.*its logits are not those in float64: off by"):
        check(CASE, one)


@pytest.mark.parametrize("wrong", ["averages", "sums"])
def test_a_wrong_backward_of_a_settled_net_is_not_timed(wrong, monkeypatch):
    differentiate = NativeSettledAlone.differentiate

    def with_wrong_averages(self, grad_y, saved, sums, memory, start):
        *tensors, expected = saved
        expected = expected._replace(whole=-expected.whole) if _timed(expected.whole) else expected
        return differentiate(self, grad_y, (*tensors, expected), sums, memory, start)

    def with_wrong_sums(self, grad_y, saved, sums, memory, start):
        before = sums[2].clone()
        found = differentiate(self, grad_y, saved, sums, memory, start)
        if _timed(before):
            sums[2].add_(sums[2] - before)
        return found

    one = contender("bkn", settled=True)
    check(CASE, one)
    if wrong == "averages":
        monkeypatch.setattr(NativeSettledAlone, "differentiate", with_wrong_averages)
        message = "the gradient of .* is not that in float64"
    else:
        monkeypatch.setattr(NativeSettledAlone, "differentiate", with_wrong_sums)
        message = "what its closing phase collects"
    with pytest.raises(LabError, match=message):
        check(CASE, one)


def _timed(tensor):
    return tensor.dtype == torch.float32  # the net that it is compared with is in float64


def test_under_autocast_activations_are_bfloat16():
    case = Case(model="digits-net", gradient_batch=8, device=CPU, precision="bf16")
    one = contender("bkn", case)
    seen = []
    norm = next(module for module in one.model.modules() if isinstance(module, GroupedNorm))
    norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].dtype))
    one.step()
    assert seen == [torch.bfloat16]
    check(case, one)


def test_the_net_without_norms_has_none_and_steps():
    one = contender(NONE)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in one.model.modules())
    assert one.step().isfinite()


@pytest.mark.filterwarnings("ignore:kalmannorm. a batch had NaN")
def test_a_loss_that_is_no_number_is_not_timed():
    one = contender("bkn")
    nn.init.constant_(next(one.model.parameters()), torch.nan)
    with pytest.raises(LabError, match=r"bkn \(8, 2\) is wrong, so nothing is timed: its loss is not a number"):
        check(CASE, one)


def test_a_missing_gradient_is_not_timed():
    one = contender("bn")
    one.model.spare = nn.Parameter(torch.zeros(3))
    with pytest.raises(LabError, match="spare has no gradient"):
        check(CASE, one)


def test_another_net_is_not_timed():
    one = contender("bkn", way="fused")
    for module in one.model.modules():
        if isinstance(module, GroupedNorm):
            module.eps = 0.1
    with pytest.raises(LabError, match=r"bkn \(8, 2\) fused is wrong.*its logits are not those in float64: off by"):
        check(CASE, one)


def test_a_wrong_gradient_is_not_timed():
    one = contender("gn")
    norm = next(module for module in one.model.modules() if isinstance(module, nn.GroupNorm))
    norm.register_forward_hook(lambda _, __, y: y.detach() + 1.5 * (y - y.detach()))
    with pytest.raises(LabError, match=r"the gradient of .* is not that in float64: off by"):
        check(CASE, one)


def test_groups_that_depend_on_each_other_are_not_timed(monkeypatch):
    one = contender("bkn")
    for module in one.model.modules():
        if isinstance(module, GroupedNorm):
            module.statistics_batch_size = 4
    monkeypatch.setattr("kalmannorm.lab.bench.step_checks._check_gradients", lambda *_: None)
    with pytest.raises(LabError, match=r"bkn \(8, 2\) is wrong.*its groups depend on each other"):
        check(CASE, one)


def test_a_baseline_that_is_no_batch_norm_is_not_timed(monkeypatch):
    one = contender(BASELINE)
    for module in one.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1.0
    monkeypatch.setattr("kalmannorm.lab.bench.step_checks._check_gradients", lambda *_: None)
    with pytest.raises(LabError, match=r"with one group its loss is not that of nn.BatchNorm: off by"):
        check(CASE, one)


def test_a_graph_that_computes_something_else_is_not_timed():
    one = contender("bkn")

    class Replayed:
        def results(self):
            return (one.step() + shift,)

    shift = 0.0
    check_replay(one, Replayed())
    shift = 1.0
    with pytest.raises(LabError, match="the loss of its CUDA graph is not that of a step"):
        check_replay(one, Replayed())


def test_a_compiled_net_is_checked_as_it_is_and_put_back(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)  # a minute of compiling would show no more
    one = contender(BASELINE, way="inductor")
    before = {key: value.clone() for key, value in one.model.state_dict().items()}
    check(CASE, one)
    assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())
    one.run = lambda images: 2 * one.model(images)
    with pytest.raises(LabError, match="its loss is not that of the plain net"):
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
    large = contender("bkn", Case(model="digits-net", gradient_batch=16, device=CPU))
    large.step()
    assert large.peak() > 1.2 * one.peak()


def test_contenders_take_turns_and_warm_up_out_of_the_clock():
    order = []

    def clock(name):
        return lambda: order.append(name) or float(len(order))

    times = take_turns({"a": clock("a"), "b": clock("b")}, 3)
    warm = 2 * WARMUP
    assert order[warm:] == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [warm + 1, warm + 4, warm + 5], "b": [warm + 2, warm + 3, warm + 6]}


def test_ratios_are_of_the_same_round(monkeypatch):
    noise = [1, 10, 100, 2, 1]
    factors = {f"{BASELINE} (8, 8)": (1, 1), "gn (8, 8)": (2, 3)}
    times = {name: [Seconds(a * n, b * n) for n in noise] for name, (a, b) in factors.items()}
    monkeypatch.setattr(step, "take_turns", lambda *_: times)
    base, gn = bench(CASE, entries(8, [2], ["gn"]), 5)
    assert (base["ratio"], gn["ratio"], gn["ratio_p80"], gn["processor_ratio"]) == (1.0, 2.0, 2.0, 3.0)
    assert (base["peak_ratio"], base["method"]) == (1.0, BASELINE)
    assert gn["peak_mib"] > 0


def test_every_method_runs_at_every_batch_that_matters_to_it():
    found = [str(entry) for entry in entries(32, [32, 4, 4], ["bkn", "gn", "bkn"], fused=True)]
    assert found == [
        "nn.BatchNorm (32, 32)",
        *(f"bkn {setting}{way}" for setting in ("(32, 32)", "(32, 4)") for way in ("", " fused")),
        "gn (32, 32)",
    ]
    found = [str(entry) for entry in entries(32, [4], ["bkn", "gn", "brn"], fused=True, settled=True)]
    assert found == [
        "nn.BatchNorm (32, 32)",
        *(f"bkn (32, 4){way}" for way in ("", " fused", " settled", " fused settled")),
        "gn (32, 32)",
        *(f"brn (32, 4){way}" for way in ("", " fused")),
    ]


def test_command(tmp_path, capsys):
    output, plot = tmp_path / "bench.csv", tmp_path / "bench.svg"
    files = ["--out", str(output), "--plot", str(plot)]
    assert run([*SMALL, "--methods", "bn,bkn", "--bound", "--statistics-batches", "4,2", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found["rows"]] == [BASELINE, "bn", "bn", "bkn", "bkn", NONE]
    assert [row["setting"] for row in found["rows"]] == ["(8, 8)", *["(8, 4)", "(8, 2)"] * 2, "(8, 8)"]
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, same in zip(rows, found["rows"], strict=True):
        assert {key: row[key] for key in same} == {key: "" if v is None else str(v) for key, v in same.items()}
        assert {"hardware", "threads", "torch", "commit", "command"} <= row.keys()
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
    assert "bkn" in plot.read_text()
    assert run([*SMALL[:1], "step", *SMALL[1:], "--methods", "gn,bn", "--settled"]) == 0
    shown = capsys.readouterr().out
    assert "MiB ratio" in shown and "gn" in shown and "bn settled" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "bkm"], "unknown method 'bkm'; did you mean 'bkn'"),
        (["--setting", "8,3"], "does not divide the gradient batch 8"),
        (["--statistics-batches", "4,3"], "does not divide the gradient batch 8"),
        (["--statistics-batches", "4,N"], "give numbers of examples, such as 32,4,2"),
        (["--model", "cifar-inceptoin"], "did you mean 'cifar-inception'"),
        (["--rounds", "2"], "from 5"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--precision", "fp8"], "choose float32 or bf16"),
        (["--cuda-graph"], "--cuda-graph needs a GPU"),
        (["--out", "."], "is a folder: name a file"),
        (["--out", "pyproject.toml/bench.csv"], "cannot write pyproject.toml/bench.csv"),
        (["--plot", "ratios.jpg"], "the name must end in .png or .svg"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert run([*SMALL, *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_compiled_steps_are_timed_too(monkeypatch):
    """The slow part of torch's compiler is left out here."""
    compile, asked = torch.compile, []

    def quick(model, *, dynamic=None, mode=None):
        asked.append(mode)
        return compile(model, backend="aot_eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", quick)
    setting = Setting(8, 2)
    chosen = [Entry(BASELINE, Setting(8, 8)), Entry("bkn", setting), Entry("bkn", setting, "fused")]
    rows = bench(CASE, chosen, 5, compile_mode="reduce-overhead")
    assert [row["compile_mode"] for row in rows] == ["reduce-overhead"] * 3
    assert all(row["compile_s"] > 0 and row["compile_cached_s"] > 0 and row["compiled_ms"] > 0 for row in rows)
    assert rows[0]["compiled_ratio"] == 1 and rows[1]["compiled_ratio"] > 0
    assert asked == [None, *["reduce-overhead"] * 3 * (1 + TIMES_CACHED + 1)]


def test_a_wrong_compiled_step_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda *x: 2 * model(*x) if x[0].dim() == 4 else x[0])
    with pytest.raises(LabError, match=r"nn.BatchNorm .* its compiled loss is not that of a plain step"):
        bench(CASE, [Entry(BASELINE, Setting(8, 8))], 5, compile_mode="default")


def test_an_unknown_mode_of_the_compiler(capsys):
    assert run([*SMALL[:1], "step", *SMALL[1:], "--compile-mode", "fast"]) != 0
    assert "--compile-mode 'fast': choose default or reduce-overhead" in capsys.readouterr().err
