"""Random numbers by counter: a draw is a function of (seed, row, sample, position) and of nothing else.

Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), vectorized in NumPy.
Batch composition, order, preemption, resume and sharding can't change a draw.
"""

from __future__ import annotations

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return ten rounds of Philox: counter (N, 4) and key (N, 2) uint32 → (N, 4) uint32."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].astype(np.uint64), key[:, 1].astype(np.uint64)
    for round_ in range(10):
        if round_:
            k0, k1 = (k0 + np.uint64(_W0)) & _LOW, (k1 + np.uint64(_W1)) & _LOW
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seeds: np.ndarray, rows: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each (seed, row, sample, position); seeds uint64, the others non-negative integers."""
    seeds, rows = seeds.astype(np.uint64), rows.astype(np.uint64)
    counter = np.stack([positions.astype(np.uint64), samples.astype(np.uint64), rows & _LOW, rows >> _SHIFT], axis=1).astype(
        np.uint32
    )
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=1).astype(np.uint32)
    bits = philox4x32(counter, key).astype(np.uint64)
    return ((bits[:, 0] << np.uint64(21)) | (bits[:, 1] >> np.uint64(11))).astype(np.float64) * 2.0**-53
