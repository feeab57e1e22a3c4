"""Fused CPU operations in C: compiled on first use, cached, optional.

`vector.h` is the arithmetic, `gemm.c` the matrix products, `attention.c` attention in training, `ops.c`
everything else; `build` compiles and loads them, `kept` is their cache, `calls` calls them with tensors.
Where no compiler works, and none has, torch is used.
"""
