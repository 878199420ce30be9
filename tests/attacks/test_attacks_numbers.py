"""Some thousand of the random cases of `support/attacks/numbers.py`, always the same ones."""

from __future__ import annotations

from support.attacks import numbers


def test_numbers_of_any_size(tmp_path):
    found = numbers.run(2000, 17, tmp_path)
    assert {name: found[name] for name in numbers.MUST_BE_ZERO} == dict.fromkeys(numbers.MUST_BE_ZERO, 0)
    assert found["cases"] >= 2000
    assert found["unjudged"] < found["judged"] / 20
