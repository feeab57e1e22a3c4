"""Kernels: fused CPU operations in C, compiled on first use, cached, and optional.

`vector.h` has the arithmetic, `gemm.c` matrix products, `attention.c` attention in training, `ops.c` all
other operations. `build` compiles and loads them, `kept` is their cache, `calls` calls them with tensors.
Without a compiler that works and without a library in the cache, torch does their work.
"""
