"""`python -m mmserve`: the same as the `mmserve` command."""

from __future__ import annotations

from mmserve.cli import main

if __name__ == "__main__":
    main(prog_name="mmserve")
