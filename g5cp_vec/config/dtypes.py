"""Element types and their exact sizes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp8", "int8", "fp4", "int4"]

# Bits, not bytes: two 4-bit elements share a byte. Scales of quantised formats are not counted.
DTYPE_BITS = MappingProxyType({"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4})


def n_bytes(elements: int, dtype: str) -> int:
    """Return the bytes that hold `elements` elements of `dtype`, rounded up to whole bytes.

    Parameters
    ----------
    elements : int
        Number of elements; an integer array is legal and is answered element by element.
    dtype : str
        A key of ``DTYPE_BITS``.

    Examples
    --------
    >>> n_bytes(3, "bf16"), n_bytes(3, "fp4")
    (6, 2)
    """
    return (elements * DTYPE_BITS[dtype] + 7) // 8
