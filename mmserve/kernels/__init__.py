"""Native CPU kernels in C++, compiled on first use, and torch code of the same signatures where they can not be.

    csrc/lanes_*.h      the vocabulary of one instruction set: AVX-512 with BF16, AVX2, or none in particular
    csrc/linear.h       products of 1 to 16 rows with a weight
    csrc/flash.h        attention of many queries: prefill over the paged cache, vision towers
    csrc/decode.h       attention of one query a sequence over the paged cache
    csrc/elementwise.h  norm, gated activation, GELU, rotary embedding
    csrc/isa_*.cpp      all of these, once an instruction set; dispatch.cpp asks the processor which to call
    csrc/exchange.cpp   ranks of one host that exchange through memory
    csrc/*.cpp          tensors, threads, one decoder layer as a whole, the Python face

Environment:
    MMSERVE_KERNELS     auto (default), off (torch code), or the instruction set to use: amx, avx512, avx2, plain
    MMSERVE_CACHE_DIR   where the compiled library is kept; default: mmserve in the user's cache folder
"""
