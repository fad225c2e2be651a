"""The command line: `mmserve demo | generate | describe | inspect | fixtures ... | bench ... | conformance`."""

from __future__ import annotations

from mmserve.cli.main import main

__all__ = ["main"]
