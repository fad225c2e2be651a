"""The command line: `mmserve demo | generate | describe | fixtures record | fixtures check`."""

from __future__ import annotations

from mmserve.cli.main import main

__all__ = ["main"]
