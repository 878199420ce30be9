"""Every Python block of the documentation runs as it stands, in the order of its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore")  # of the packages that the pages show
@pytest.mark.parametrize("page", ["integrations.md"])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": page}
    found = blocks(DOCS / page)
    assert found
    for block in found:
        exec(compile(block, page, "exec"), scope)
