"""Which launches are chosen, against the sweep of an H200 that they were chosen from; its record needs no GPU."""

from __future__ import annotations

import pytest

from kalmannorm._ops.normalize import tiling as launch
from kalmannorm._ops.normalize.tiling import Shape

pytest.importorskip("triton")
launches = pytest.importorskip("launches")

MEASURED = launches.measured(launches.RECORD)


def named(key):
    case, direction = key
    return f"{launches.word(case)}-{'NHWC' if case.shape.channels_last else 'NCHW'}-{direction}"


def test_the_record_is_of_these_cases():
    assert {case for case, _ in MEASURED} == set(launches.CASES)


@pytest.mark.parametrize("key", MEASURED, ids=named)
def test_near_the_best(key):
    times, chosen = MEASURED[key], launches.tile(launches.chosen(*key))
    if chosen not in times:
        pytest.skip("not among what was measured")
    assert times[chosen] <= 1.2 * min(times.values())


BOTH = launches.measured(launches.RECORD_OF_BOTH)


def test_the_record_of_both_is_of_these_cases():
    assert {case for case, _ in BOTH} == set(launches.CASES_OF_BOTH)


@pytest.mark.parametrize("key", BOTH, ids=named)
def test_near_the_best_with_the_backward_behind(key):
    times = BOTH[key]
    assert times[launches.tile(launches.chosen(*key))] <= 1.1 * min(times.values())


def test_nearly_all_was_measured():
    missing = [named(key) for key in MEASURED if launches.tile(launches.chosen(*key)) not in MEASURED[key]]
    assert len(missing) <= 3, missing


@pytest.mark.parametrize("case", launches.CASES[::7], ids=lambda case: named((case, "")))
def test_a_sweep_tries_what_is_chosen_and_more(case):
    tried = set(launches.candidates(case))
    assert {launches.chosen(case, direction) for direction in ("forward", "backward")} < tried
    assert len(tried) >= 5


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        (Shape(4, 96, 56 * 56, 2, True), 2),
        (Shape(4, 17, 56 * 56, 2, True), 64),
        (Shape(4, 256, 56 * 56, 2, True), 1),
        (Shape(4, 96, 77 * 77, 2, True), 1),
        (Shape(4, 40, 14 * 14, 2, True), 1),
        (Shape(4, 96, 56 * 56, 2, False), 1),
    ],
    ids=["two", "all 64", "full by themselves", "odd images", "too few positions", "contiguous"],
)
def test_positions_that_fill_a_row(shape, positions):
    assert shape.filling == positions


def test_few_rows_are_not_taken_abreast():
    """Two chunks of them are a program's own; K would be left over."""
    shape = Shape(2, 96, 256, 1, True)
    assert launch.launch_of(shape, 64, 64, 4, 8, 2) == launch.Launch(64, 64, 0, 4, 8)
    assert launch.launch_of(shape, 32, 64, 4, 8, 2) == launch.Launch(32, 64, 4, 4, 8, 2)
    assert launch.launch_of(shape, 32, 64, 0, 8, 2) == launch.Launch(32, 64, 0, 8, 8)

    short = Shape(1024, 40, 1024, 1, True)
    assert short.filling == 8 and launch.launch_for(short, 132) == launch.Launch(128, 32, 0, 8)


def test_tiles_are_even_by_the_rows_that_they_see():
    shape = Shape(4, 96, 384, 2, True)
    assert launch.launch_of(shape, 128, 64, 2, 8, 2).even(shape)
    assert not launch.launch_of(shape, 256, 64, 2, 8).even(shape)
    assert not launch.launch_of(shape, 256, 64, 2, 8, 2).even(shape)


def test_float32_keeps_positions_abreast():
    shape = Shape(64, 96, 112 * 112, 2, True)
    half, wide = (launch.launch_for(shape, 132, wide=wide) for wide in (False, True))
    assert half.K == wide.K == 2 and half.BR == 2 * wide.BR


SIZES = [
    Shape(N, C, L, m, last)
    for C in (1, 3, 17, 24, 40, 64, 96, 100, 160, 336, 720, 1072)
    for L in (1, 49, 196, 784, 1024, 3136, 12544, 65536)
    for N, m in ((1, 1), (8, 2), (33, 2), (64, 64), (1024, 1), (1024, 4))
    for last in (True, False)
]


@pytest.mark.parametrize("processors", [1, 20, 46, 82, 108, 132, 144])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_launch_can_be(processors, backward):
    for shape in SIZES:
        for wide in (False, True):
            how = launch.launch_for(shape, processors, backward=backward, wide=wide)
            seen = shape.abreast(how.K)
            assert how.chunks == seen.chunks(how.BR) and 0 <= how.splits <= how.chunks, (shape, how)
            assert how.K == 1 or (shape.channels_last and shape.L % how.K == 0 and how.splits), (shape, how)
            assert how.splits * how.K <= launch.MOST_MERGED, (shape, how)
            if how.K > 1:
                programs = shape.groups * -(-seen.C // how.BC) * how.splits
                assert programs >= 0.9 * processors, (shape, how)
                partial = 2 * 4 * shape.groups * seen.C * how.splits
                assert partial <= 0.05 * 2 * shape.size, (shape, how)


@pytest.mark.parametrize("processors", [1, 20, 46, 82, 108, 132, 144])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_settled_launch_can_be(processors, backward):
    for shape in SIZES:
        for wide in (False, True):
            how = launch.settling(shape, processors, backward=backward, wide=wide)
            assert how.chunks == shape.abreast(how.K).chunks(how.BR), (shape, how)
            assert 1 <= how.splits <= max(how.chunks, 1) and 1 <= how.warps <= 16, (shape, how)
            assert 128 * 32 * how.warps >= how.BR * how.BC, (shape, how)  # values of a thread
