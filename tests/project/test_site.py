"""The documentation site builds without a warning, and its references are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kalmannorm

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocstrings", reason="the tools of the site need Python 3.11")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_and_links_lead_somewhere(site):
    """mkdocs checks links between pages. Links to files of the repository are checked here."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for link in re.findall(r'href="([^"#?]+)', page.read_text(encoding="utf-8")):
            if "://" not in link and not link.startswith(("mailto:", "/")):
                assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


def test_the_reference_lists_every_public_name():
    listed = set(re.findall(r"^::: kalmannorm\.(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE))
    assert set(kalmannorm.__all__) - listed == {"__version__", "functional"}


def test_the_reference_of_the_command_lists_every_command(site):
    page = (site / "cli" / "index.html").read_text(encoding="utf-8")
    for name in ("train", "compare", "bench step", "data fetch", "export"):
        assert f"kalmannorm {name}" in page
    assert "--learning-rate" in page
