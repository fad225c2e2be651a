"""Ctrl-C in the middle of a batch: the program ends with one traceback, and no thread holds it up."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WAIT = 120
"""Seconds after which a test gives up."""

PROGRAM = """
import signal, sys, threading
from mmserve import MMPipeline

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it

pipe = MMPipeline(dtype="float32", num_blocks=4096, max_num_seqs=4)

def processor(ids, scores):
    if not amid.is_set():
        amid.set()
        print("amid", flush=True)
    return scores

amid = threading.Event()
try:
    pipe.generate_batch([{"prompt": "Hello?", "sampling": {"max_tokens": 4000, "ignore_eos": True},
                          "logits_processors": [processor]} for _ in range(40)])
except KeyboardInterrupt:
    if %(catches)s:
        pipe.generate(None, "Hello?", max_tokens=2)
        assert pipe.stats()["running"] <= 1, pipe.stats()
        pipe.close()
        names = [thread.name for thread in threading.enumerate()]
        assert names == ["MainThread"], names
        print("goes on", flush=True)
        sys.exit(0)
    raise
print("answered", flush=True)
"""


def interrupt(program: str) -> tuple[int, str, str]:
    """Run `program` until it says that it is in the middle, press Ctrl-C; its exit code, output and errors."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "amid\n", process.communicate(timeout=WAIT)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("catches", [False, True])
def test_ctrl_c_ends_a_batch(catches: bool) -> None:
    code, out, err = interrupt(PROGRAM % {"catches": catches})
    assert err.count("Traceback") == (not catches), err
    assert "Exception ignored" not in err
    if catches:
        assert (code, out) == (0, "goes on\n"), err
    else:
        assert code in (-signal.SIGINT, 128 + signal.SIGINT), err
        assert out == ""
        assert err.rstrip().endswith("KeyboardInterrupt")
