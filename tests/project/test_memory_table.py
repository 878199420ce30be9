"""The tables of docs/memory.md are what the records of `benchmarks/memory.py` say, and the benchmark measures."""

from __future__ import annotations

import memory
import memory_table
import pytest
import torch
from torchvision.models.resnet import BasicBlock

from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.step_contenders import Case
from kalmannorm.lab.machine.origin import origin


def test_the_document_says_what_the_records_say():
    assert memory_table.records(), "there is a record at least of the CPU"
    text = memory_table.DOCUMENT.read_text(encoding="utf-8")
    assert memory_table.written(text) == text, "run python benchmarks/memory_table.py"


@pytest.fixture(scope="module")
def rows():
    case = Case(
        model="cifar-resnet-20", gradient_batch=4, device=torch.device("cpu"), image_size=32, channels_last=True,
        precision="bf16",
    )  # fmt: skip
    return memory.measure(case, 5)


def test_counts_what_every_way_keeps(rows):
    kept = {row["way"]: row["kept_ratio"] for row in rows}
    assert list(kept) == list(memory.WAYS)
    assert kept["BKN saving"] < 0.65 < 0.9 < kept["BKN fused"]
    assert kept["BKN both"] <= kept["BKN checkpoints"]


def test_tables_of_a_cpu_and_of_a_gpu(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_table, "RECORDS", tmp_path)
    write_csv(tmp_path / "memory-cpu.csv", rows, origin())
    measured = [
        {**row, "peak_mib": 100.0 + n, "peak_ratio": 1 + n / 100, "ratio": 0.8, "eager_ratio": 1.2}
        for n, row in enumerate(rows)
    ]
    write_csv(tmp_path / "memory-h200.csv", measured, origin())
    found = [
        {"model": "resnet50", "image_size": 512, "precision": "bf16", "limit_gib": 24.0, "way": way,
         "largest_batch": 100, "ratio": 1.0} for way in memory.WAYS
    ]  # fmt: skip
    write_csv(tmp_path / "memory-largest-h200.csv", found, origin())
    text = memory_table.written("<!-- memory-h200.csv -->\n<!-- end of memory-h200.csv -->\n")
    saving = rows[3]
    assert f"| cifar-resnet-20 | BKN saving | {saving['kept_mib']:.0f} | {saving['kept_ratio']:.2f} |" in text
    assert "| cifar-resnet-20 | BKN both | 105 | 1.05 | 0.80 | 1.20 |" in text
    assert "| resnet50 | BKN both | 100 | 1.00 |" in text and "images of 512² that fits 24 GiB" in text
    assert memory_table.written(text) == text


@pytest.mark.parametrize(("fixed", "each", "exact"), [(5, 1, True), (40, 3, True), (5, 1, False)])
def test_the_search_finds_the_largest_batch(fixed, each, exact):
    """Also if a step needs a little more memory than two small ones predict."""

    def peak(batch):
        tried.append(batch)
        size = fixed + each * batch + (0 if exact else batch // 20)
        return None if size > 200 else size

    tried = []
    found = memory.search(peak, 200)
    assert found % 4 == 0 and peak(found) is not None and peak(found + 4) is None
    assert len(tried) < 10


def test_blocks_are_checkpointed():
    block = memory.checkpointed(BasicBlock(4, 4))
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    _, kept = memory.kept_tensors(lambda: block(x))
    assert [each.tensor.data_ptr() for each in kept] == [x.data_ptr()]
    block(x).sum().backward()
    assert block.conv1.weight.grad is not None
