"""A fixed amount of work of the kernel's kind: what a machine takes for it says how fast the machine is.

A heap of events, each of which follows links between entries scattered over a megabyte and divides two floats. It
uses nothing of the package, so no change of the package moves it.
"""

from __future__ import annotations

import numba
import numpy as np

N_EVENTS = 40_000
N_ALIVE = 256
N_ENTRIES = 1 << 16
N_LINKS = 6


@numba.njit(cache=True, error_model="numpy")
def _work(following, amount, key, heap, n_events):
    """Take the earliest event, walk a few entries from it, and put it back later; return a checksum."""
    n = len(heap)
    total = 0.0
    at = 1
    for _ in range(n_events):
        first = heap[0]
        now = key[first]
        left = 0.0
        for _ in range(N_LINKS):
            at = following[at]
            left += amount[at] / (1.0 + amount[following[at]])
        total += left
        key[first] = now + 0.1 + left
        pos = 0
        while True:
            child = 2 * pos + 1
            if child >= n:
                break
            if child + 1 < n and key[heap[child + 1]] < key[heap[child]]:
                child += 1
            if key[heap[child]] >= key[first]:
                break
            heap[pos] = heap[child]
            pos = child
        heap[pos] = first
    return total


class Calibration:
    """The work, made ready."""

    def __init__(self) -> None:
        # A permutation that is one cycle through all entries, in no order that a cache could guess.
        bits = np.random.PCG64(1).random_raw(N_ENTRIES)
        order = np.argsort(bits, kind="stable")
        self._following = np.empty(N_ENTRIES, np.int64)
        self._following[order] = np.roll(order, -1)
        self._amount = (bits >> np.uint64(11)) * 2.0**-53
        self.run()

    def run(self) -> float:
        """Do the work once; return its checksum, the same every time."""
        key = np.linspace(0.0, 1.0, N_ALIVE)
        return float(_work(self._following, self._amount, key, np.arange(N_ALIVE), N_EVENTS))
