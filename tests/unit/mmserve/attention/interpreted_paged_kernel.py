"""Run xformers' paged split-K kernel on a CPU, through Triton's interpreter, with the operands that our backend makes.

Prints one word a case that agrees with the float64 oracle; run by test_xformers.py in a process of its own.
"""

from __future__ import annotations

import importlib
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import xformers
from oracle import make_case, spec_of

from mmserve.attention.xformers import decode_operands

PAGE = 64
CASES = {"whole": {}, "window": {"window": 40}, "chunk": {"chunk": 96}}


def main() -> None:
    torch.set_num_threads(1)
    xformers._is_triton_available = lambda: True  # it looks for a GPU; the interpreter needs none
    kernel = importlib.reload(importlib.import_module("xformers.ops.fmha.triton_splitk"))
    from xformers.ops.fmha.common import Inputs

    for name, more in CASES.items():
        spec = spec_of(4, 2, 32, **more)
        case = make_case(spec, [(99, 1), (132, 1), (0, 1)], block_size=PAGE, dtype=torch.float16)
        for cache, new in ((case.cache.key, case.key), (case.cache.value, case.value)):
            cache.flatten(0, 1)[case.metadata.slot_mapping] = new
        query, key, value, bias = decode_operands(case.query, case.cache, spec, case.metadata, range(3))
        out, _ = kernel.FwOp.apply(Inputs(query, key, value, bias, scale=spec.scale), needs_gradient=False)
        torch.testing.assert_close(out.reshape(3, 4, 32).double(), case.expected, atol=2e-3, rtol=2e-3)
        print(name)  # noqa: T201


if __name__ == "__main__":
    main()
