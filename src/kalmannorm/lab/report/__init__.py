"""One page that shows what runs and experiments found: `write`."""

from __future__ import annotations

from kalmannorm.lab.report.writing import summarize, write

__all__ = ["summarize", "write"]
