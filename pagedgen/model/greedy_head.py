"""Each row's best next token without most of the logits: for steps whose rows all decode greedily.

A model's head is a large part of a decode step, and of a row's logits only the largest is wanted. `kernels/cpu/greedy.py`
rules out nearly all of them by 8-bit weights and a bound on what rounding did, and computes the rest in full: the token is the
one that the logits have.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..kernels.cpu import fused
from .int8 import quantize_channels
from .panels import PanelLinear

# Sums of products with rows of 12 bits stay below 2**31.
_MOST_FEATURES = 8192
_CHANNELS_AT_ONCE = 4096
# More than the bounds themselves, sums of up to so many squares in fp32, are rounded by.
_CARE = 1 + 1e-3


class GreedyHead:
    """The best output channels of a linear map that has been packed."""

    def __init__(self, linear: nn.Linear, panels: PanelLinear):
        in_features = linear.in_features
        self._panels = panels.panels
        quantized, scales, slack, rounded = [], [], [], []
        for part in linear.weight.detach().split(_CHANNELS_AT_ONCE):
            weight = part.float()
            codes, scale = quantize_channels(weight, 127)
            quantized.append(codes)
            scales.append(scale)
            whole = codes * scale[:, None]
            # |x @ w - x' @ w'| <= |x| |w - w'| + |x - x'| |w'|, where x - x' is at most half a scale in every element; and a
            # product in fp32 is within (n + a few) units in the last place of |x| |w| (Higham 2002, section 3.1).
            arithmetic = (in_features + 16) * 2.0**-22
            slack.append(((weight - whole).norm(dim=1) + arithmetic * weight.norm(dim=1)) * _CARE)
            rounded.append(whole.norm(dim=1) * (0.5 * math.sqrt(in_features) * _CARE))
        self._whole = fused.pack_int8(torch.cat(quantized), torch.cat(scales))
        self._rounded, self._slack = torch.cat(rounded), torch.cat(slack)

    def __call__(self, x: torch.Tensor, num_token_ids: int) -> torch.Tensor:
        """Return ids (T,) of the largest logits of states x (T, in_features) among `num_token_ids`; -1 where not finite."""
        return fused.best_channels(x, self._panels, self._whole, self._rounded, self._slack, num_token_ids)


def make_greedy_head(linear: nn.Linear, head: nn.Module, dtype: torch.dtype) -> GreedyHead | None:
    """Return the search for a head's best channels in a dtype; None where logits have to be computed."""
    # Logits in 16 bits are rounded, and the first of those that became equal is chosen: that takes all of them.
    if not isinstance(head, PanelLinear) or dtype != torch.float32 or linear.bias is not None:
        return None
    fits = linear.in_features % 4 == 0 and linear.in_features <= _MOST_FEATURES
    return GreedyHead(linear, head) if fits and bool(torch.isfinite(linear.weight).all()) else None
