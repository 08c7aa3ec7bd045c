"""Kernels over a paged KV cache: write K/V, prefill attention, decode attention, copy blocks.

`api.py` holds the signatures and picks a backend; `reference.py` is the truth in plain torch; `cpu/` (numba) and `gpu/`
(Triton) are the fast twins. This package imports nothing else of pagedgen, and importing it loads neither torch nor a backend.
"""
