"""The command line: `mmserve demo | generate | describe | fixtures record, check | bench compare, attention, ...`."""

from __future__ import annotations

from mmserve.cli.main import main

__all__ = ["main"]
