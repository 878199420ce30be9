"""Kernels that other processes build are those that launches look for, and the building does no harm.

Triton compiles for a GPU that need not be there: a driver stands in for it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", minversion="3.6")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kalmannorm import ClosingPhase, convert, fuse
from kalmannorm._norms.computed_weights import CentredConv2d, ComputedWeight
from kalmannorm._ops import dispatch, plain, triton_building, triton_launching
from kalmannorm._ops.filters import triton_filters, triton_together
from kalmannorm._ops.filters.together import filters_of
from kalmannorm._ops.normalize import (
    registered,
    triton_learned,
    triton_rows,
    triton_run,
    triton_settled_rows,
    triton_settled_run,
)
from kalmannorm._ops.predict import triton_predict
from kalmannorm._ops.propagate import triton_bundle
from kalmannorm._ops.triton_building import Wanted, build, jobs_of, missing, workers_for
from kalmannorm._running import first_step, prior_bundles
from kalmannorm._wiring.program import Context
from support.ready_launches import forget
from support.short_way import use_kernels_on_the_cpu

pytestmark = pytest.mark.skipif(not triton_building.DIRECT, reason="another version of Triton")
OPTIONS = {"PDL": True, "launch_pdl": True}


class StandIn:
    """A driver of a GPU that is not there. Its number is that of no real device, for which Triton keeps kernels too."""

    def get_current_device(self):
        return 99

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a real GPU is not asked
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(triton_building.VARIABLE, "2")
    before = driver._active
    driver.set_active(StandIn())
    monkeypatch.setattr(triton_launching, "launch_options", lambda device: OPTIONS)
    monkeypatch.setattr(triton_run, "launch_options", lambda device: OPTIONS)
    monkeypatch.setattr(triton_settled_run, "launch_options", lambda device: OPTIONS)
    monkeypatch.setattr(triton_predict, "launch_options", lambda device: OPTIONS)
    forget()
    yield
    driver._active = before
    forget()


class Block(nn.Module):
    """A residual block with a stride, so that inputs of norms have several sizes."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.down = nn.Sequential(nn.Conv2d(24, 32, 1, stride=2), nn.BatchNorm2d(32))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.down(x)).relu()


def net(fused=False, head=False, transition="weights", **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), Block()]
    if head:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10), nn.BatchNorm1d(10)]
    options = {"statistics_batch_size": 2, "transition": transition, **options}
    model = convert(nn.Sequential(*layers), torch.randn(2, 3, 16, 16), **options)
    return fuse(model, torch.randn(2, 3, 16, 16)) if fused else model


def use_kernels(monkeypatch):
    use_kernels_on_the_cpu(monkeypatch)
    monkeypatch.setattr(prior_bundles, "runner", lambda *_: triton_bundle)
    monkeypatch.setattr(first_step, "runner", lambda *_: triton_bundle)
    monkeypatch.setattr(first_step, "row_kernels_for", lambda *_: triton_rows.TritonRows)
    monkeypatch.setattr(first_step, "settled_row_kernels_for", lambda *_: triton_settled_rows.TritonSettledRows)
    monkeypatch.setattr(first_step, "learned_kernels_for", lambda *_, **__: triton_learned.TritonLearned)


def predicted(model, x):
    """The launches of a step, from the input of the first norm."""
    relay = next(each.wire.relay for each in model.modules() if getattr(each, "wire", None) is not None)
    make = prior_bundles.PriorBundles.of_learned if relay.learned else prior_bundles.PriorBundles.of
    bundles = make(relay.plan, None)
    context = Context(x.device, torch.float32, {}, x.shape[0])
    bundles.update(context)
    return first_step.launches_of_step(bundles, model, bundles.calls[0].identity, x, context)


def made(model, x, monkeypatch):
    """The launches that a step makes. Nothing is computed."""
    found = []

    def run(self, *args, grid, warmup, **options):
        found.append(Wanted(SimpleNamespace(kernel=self, numbers=(), options=options), args))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        model(x).sum().backward()
    return found


def named(launches):
    return {job.key: job.name for job in jobs_of(launches)}


@pytest.mark.filterwarnings("ignore:kalmannorm")  # nothing is computed
@pytest.mark.parametrize("head", [False, True], ids=["convolutions", "with a head"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize(("batch", "size"), [(2, 16), (6, 40)], ids=["example", "larger"])
@pytest.mark.parametrize(("transition", "settled"), [("weights", False), ("learned", False), ("weights", True)])
def test_the_kernels_of_a_step_are_predicted(transition, settled, batch, size, last, fused, head, monkeypatch):
    model = net(fused, head, transition)
    if settled:
        ClosingPhase(model, 10, start=0, end=0)
    use_kernels(monkeypatch)
    layout = torch.channels_last if last else torch.contiguous_format
    model, x = model.to(memory_format=layout), torch.randn(batch, 3, size, size).contiguous(memory_format=layout)
    expected = named(predicted(model, model[0](x)))
    assert named(made(model, x, monkeypatch)) == expected
    assert len(expected) > 8


@pytest.mark.filterwarnings("ignore:kalmannorm")  # nothing is computed
@pytest.mark.parametrize("learns", [True, False], ids=["learning", "frozen"])
@pytest.mark.parametrize("kinds", [["scaled"], ["scaled", "centred"]], ids=str)
@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_the_kernels_of_computed_filters_are_predicted(transition, kinds, learns, monkeypatch):
    model = net(transition=transition, weight_standardization=True)
    if "centred" in kinds:
        model[0].__class__ = CentredConv2d
    for module in model.modules():
        if isinstance(module, ComputedWeight):
            module.weight.requires_grad_(learns)
    use_kernels(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *_, **__: None)  # priors read filters
        wanted = predicted(model, torch.randn(2, 24, 16, 16))
    expected = named(wanted)
    assert named(made(model, torch.randn(2, 3, 16, 16), monkeypatch)) == expected
    names = list(expected.values())
    assert names.count("filters_kernel") == len(kinds)
    assert names.count("filters_backward_kernel") == len(kinds) * learns


@contextmanager
def listening(monkeypatch):
    """Whether Triton found each kernel in its cache."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "listener", lambda *, src, cache_hit, **_: found.append(cache_hit))
        yield found


def few(monkeypatch):
    """Launches of four kernels from several modules."""
    use_kernels(monkeypatch)
    model = net()
    launches = predicted(model, torch.randn(6, 24, 40, 40))
    first = {launch.launch.kernel.module: launch for launch in launches}
    assert len(first) > 4
    return list(first.values())[:4]


def launched(launches):
    """As Triton launches, without the launch."""
    for launch, given in launches:
        launch.kernel.device_caches.pop(99, None)
        launch.kernel.warmup(*given, *launch.numbers, grid=launch.grid, **launch.options)


@pytest.mark.parametrize("computation", ["centred", "standardized", "scaled"])
def test_filters_are_built_once(computation, monkeypatch):
    """For this GPU. Later steps find both kernels, whichever layers are computed."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    with listening(monkeypatch) as found:
        for shapes in ([(8, 3, 3, 3), (8, 300, 3, 3)], [(16, 8, 1, 1)]):
            weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
            launches = []

            def run(self, *args, grid, warmup, launches=launches, **options):
                launches.append(Wanted(SimpleNamespace(kernel=self, numbers=(), options=options, grid=grid), args))

            with monkeypatch.context() as patch:
                patch.setattr(JITFunction, "run", run)
                sum(each.sum() for each in filters_of(weights, computation)).backward()
            assert [each.launch.kernel.__name__ for each in launches] == ["filters_kernel", "filters_backward_kernel"]
            launched(launches)
    assert found == [False, False, True, True]


@pytest.fixture
def started(monkeypatch):
    """The processes that were started to build kernels. Triton starts others, to ask its assembler for a version."""
    found = []
    start = subprocess.Popen.__init__

    def note(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if triton_building.triton_worker.__file__ in self.args:
            found.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    return found


def test_launches_find_what_was_built(monkeypatch, started):
    launches = few(monkeypatch)
    assert build(launches) == 4
    assert len(started) == 2 and all(process.returncode is not None for process in started)
    with listening(monkeypatch) as found:
        launched(launches)
    assert found == [True] * 4
    started.clear()
    assert missing(jobs_of(launches)) == [] and build(launches) == 0 and not started


def test_launches_of_filters_find_what_was_built(monkeypatch, started):
    """A type is among the constants of these kernels."""
    device = torch.device("cpu")
    step = triton_together.launches_of_step(torch.bfloat16, "scaled", device, gradients=True)
    launches = [Wanted.of(*each) for each in step]
    assert build(launches) == 2 and started
    with listening(monkeypatch) as found:
        launched(launches)
    assert found == [True, True]


def test_nothing_is_built_for_other_settings(monkeypatch):
    """A process whose settings are not those of the launch builds nothing that no launch would find."""
    launches = few(monkeypatch)[:2]
    monkeypatch.setattr(
        triton_building, "jobs_of", lambda wanted: [job._replace(key="0" * 64) for job in jobs_of(wanted)]
    )
    assert build(launches) == 0
    with listening(monkeypatch) as found:
        launched(launches)
    assert found == [False] * 2


WORKERS = {
    "ends": "",
    "fails": "raise RuntimeError",
    "says nothing": "import time; time.sleep(600)",
    "says something else": "print('?' * 9, flush=True); import time; time.sleep(600)",
    "is no program": "def",
}


@pytest.mark.parametrize("program", WORKERS.values(), ids=WORKERS.keys())
def test_a_process_that_fails_does_no_harm(program, monkeypatch, started, tmp_path):
    launches = few(monkeypatch)
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setattr(triton_building.triton_worker, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(triton_building, "PATIENCE", 0.5)
    assert build(launches) == 0
    assert started and all(process.returncode is not None for process in started)


def test_a_program_that_is_no_python_is_not_waited_for(monkeypatch, started, tmp_path):
    launches = few(monkeypatch)
    (tmp_path / "worker.py").write_text(WORKERS["says nothing"])
    monkeypatch.setattr(triton_building.triton_worker, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(triton_building, "START", 0.5)
    begin = time.monotonic()
    assert build(launches) == 0
    assert time.monotonic() - begin < triton_building.PATIENCE / 2
    assert started and all(process.returncode is not None for process in started)


def test_no_process_can_be_started(monkeypatch):
    launches = few(monkeypatch)
    for executable in (None, "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", executable)
        assert build(launches) == 0


def test_processes_start_no_processes(monkeypatch, tmp_path):
    """`sys.executable` may be an application that embeds Python and runs this library itself."""
    launches = few(monkeypatch)
    (tmp_path / "worker.py").write_text(
        f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ[{triton_building.VARIABLE!r}])"
    )
    monkeypatch.setattr(triton_building.triton_worker, "__file__", str(tmp_path / "worker.py"))
    assert build(launches) == 0
    assert (tmp_path / "seen").read_text() == "0"


def test_a_frozen_application_starts_no_processes(monkeypatch, started):
    launches = few(monkeypatch)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert build(launches) == 0 and not started


def test_a_job_that_cannot_be_sent_does_no_harm(monkeypatch):
    """No thread fails: pytest makes that an error."""
    launches = few(monkeypatch)
    monkeypatch.setattr(
        triton_building, "jobs_of", lambda wanted: [job._replace(target=lambda: None) for job in jobs_of(wanted)]
    )
    assert build(launches) == 0


def test_no_cache_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert build(few(monkeypatch)) == 0


def test_number_of_processes(monkeypatch):
    monkeypatch.delenv(triton_building.VARIABLE)
    monkeypatch.setattr(triton_building.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert [workers_for(jobs) for jobs in (0, 1, 3, 41)] == [0, 0, 3, 8]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert workers_for(41) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert workers_for(41) == 4
    monkeypatch.setattr(triton_building.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert workers_for(41) == 0
    for chosen, expected in (("0", 0), ("3", 3), ("many", 0)):
        monkeypatch.setenv(triton_building.VARIABLE, chosen)
        assert workers_for(41) == expected


def test_progress_is_shown_in_a_terminal(monkeypatch, capsys):
    launches = few(monkeypatch)[:2]
    monkeypatch.setattr(triton_building, "QUIET", 0.0)
    assert build(launches) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(triton_building, "_terminal", lambda: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", triton.knobs.cache.dir + "-2")
    assert build(launches) == 2
    assert "2 of 2 kernels built in " in capsys.readouterr().err


KEYS = """
import importlib, sys
modules = [importlib.import_module(name) for name in sys.argv[2:]]
functions = [pair for module in modules for pair in vars(module).items() if type(pair[1]).__name__ == "JITFunction"]
named = dict(functions)
order = sorted(named, reverse=sys.argv[1] == "reversed")
print(sorted((name, named[name].cache_key) for name in order))
"""


def test_keys_do_not_depend_on_the_order_of_launches(monkeypatch):
    use_kernels(monkeypatch)
    modules = {launch.launch.kernel.module for launch in predicted(net(), torch.randn(2, 24, 16, 16))}
    modules = sorted(modules | {triton_filters.__name__})
    found = [
        subprocess.run([sys.executable, "-c", KEYS, order, *modules], check=True, capture_output=True, text=True).stdout
        for order in ("sorted", "reversed")
    ]
    assert found[0] == found[1] and len(found[0]) > 1000


BARE = """
import importlib, sys, types
package = types.ModuleType("kalmannorm")
package.__path__ = [sys.argv[1]]
sys.modules["kalmannorm"] = package
for name in sys.argv[2:]:
    importlib.import_module(name)
sys.exit("torch" in sys.modules)
"""


def test_processes_do_not_import_torch(monkeypatch):
    use_kernels(monkeypatch)
    modules = {launch.launch.kernel.module for launch in predicted(net(), torch.randn(2, 24, 16, 16))}
    modules |= {triton_filters.__name__}
    assert len(modules) > 5
    folder = str(Path(dispatch.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", BARE, folder, *sorted(modules)], check=False).returncode == 0


def test_fuse_builds_no_kernel(monkeypatch):
    """It looks at how modules are called. Numbers are compared in float64, for which there are no kernels."""
    seen = []

    def kernels_for(x, size):
        seen.append((x.dtype, plain.PLAIN.active))
        return dispatch.aten

    monkeypatch.setattr(registered, "kernels_for", kernels_for)
    monkeypatch.setattr(dispatch, "row_kernels_for", lambda *_: None)
    monkeypatch.setattr("kalmannorm._running.short_way.row_kernels_for", lambda *_: None)
    model = net(fused=True)
    assert len(model.fusion.fused) == 3
    assert seen and all(plain or dtype == torch.float64 for dtype, plain in seen)
    assert any(plain for _, plain in seen) and not plain.PLAIN.active


def test_without_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_for", lambda device: triton_run)
    device = torch.device("cuda", 0)
    assert dispatch.has_kernels(device)
    with plain.without_kernels():
        assert not dispatch.has_kernels(device)
    assert dispatch.has_kernels(device)
