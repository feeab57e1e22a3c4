"""Fused CPU operations in C: compiled on first use, cached, optional.

`vector.h` is the arithmetic, `ops.c` the operations between matrix products, `gemm.c` the weight
gradient; `build` compiles and loads them. Where no compiler is found, torch does the same work.
"""
