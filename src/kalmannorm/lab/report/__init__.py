"""One page that shows the results of runs and experiments: `write`."""

from __future__ import annotations

from kalmannorm.lab.report.writing import summarize, write

__all__ = ["summarize", "write"]
