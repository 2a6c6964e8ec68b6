"""Prefill with linear attention over pcp ranks: contiguous pieces, their states handed over (vllm-ascend).

A prompt is cut into pcp contiguous pieces (`g5cp_vec.mapping.load.is_contiguous`), as even as can be; all are priced as
the first, which is a token longer than the last where they are not. The last taps of every piece are gathered, and the
convolution of each starts from those before it. A first pass goes through a piece as if nothing came before, and
multiplies up what the piece does to a state (a matrix a head); the states that pieces leave behind are gathered, then
these matrices. Every rank combines both in order, and all but the first go through their pieces once more from the
state they now know, before outputs are formed. Source: the gated delta rule and causal convolution of vllm-ascend
v0.23, pull request 7422.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.forms.communicators import Sharded
from g5cp_vec.mapping.graph import Ids


def handed_over(s: Sharded, ready: Ids, *, taps: bool) -> Ids:
    """Add the taps' gathering, the first pass, the hand-over, and the pass that forms outputs."""
    arrived = s.gather(s.over_pcp, [ready], "pcp_taps", s.pcp_reason) if taps else []
    summed = s.compute("states", ready, *arrived, reason="attention")
    states = s.gather(s.over_pcp, [summed], "pcp_states", s.pcp_reason)
    transitions = s.gather(s.over_pcp, [summed, *states], "pcp_transitions", s.pcp_reason)
    is_later = np.minimum(s.pcp_classes(alike=False), 1)
    return s.compute_each("scan", is_later, summed, *states, *transitions)
