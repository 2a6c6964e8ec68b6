"""Element types and their exact sizes.

A plain type is so many bits an element. A block format, for weights only, stores scales beside its elements: one for
every block of a weight matrix, counted for each matrix (and each shard of one) with its last blocks filled up.
Scales of a quantised cache, of activations, and of plain types (one a tensor or a row, at most) are not counted.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Dtype = Literal["bf16", "fp16", "fp8", "int8", "fp4", "int4", "fp32"]
WeightDtype = Literal[
    "bf16", "fp16", "fp8", "int8", "fp4", "int4", "fp32", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4_group32",
    "int4_group64", "int4_group128", "int4_group32_zeros", "int4_group64_zeros", "int4_group128_zeros",
    "int8_group32", "int8_group64", "int8_group128", "int8_group32_zeros", "int8_group64_zeros", "int8_group128_zeros",
    "fp8_a16", "int8_a16", "mxfp4_a16", "nvfp4_a16",
]  # fmt: skip

# Bits, not bytes: two 4-bit elements share a byte.
DTYPE_BITS = MappingProxyType({"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4, "fp32": 32})
# What weights are stored in that are widened to activations before they meet them; no chip has a rate for these.
_WIDENED_BITS = MappingProxyType({"w8": 8, "w4": 4})


class BlockFormat(NamedTuple):
    """Elements of a plain type with one scale a block.

    Attributes
    ----------
    element : str
        Type of the elements, at whose rate products run.
    rows, columns : int
        Block of a weight matrix of (inputs, outputs).
    scale_bytes, matrix_bytes : int
        Of one scale, and beside the scales once a matrix.
    zero_bits : int
        Of the zero point beside a scale.
    """

    element: str
    rows: int
    columns: int
    scale_bytes: int
    matrix_bytes: int = 0
    zero_bits: int = 0


# fp8_block: DeepSeek-V3 (arXiv:2412.19437, section 3.3: 128 x 128 blocks; the checkpoint's weight_scale_inv is fp32).
# mxfp8, mxfp4: OCP Microscaling Formats 1.0 (blocks of 32 along the inputs, E8M0 scales of one byte).
# nvfp4: blocks of 16 along the inputs with E4M3 scales of one byte, and one fp32 scale a matrix (arXiv:2509.25149).
# int4_group32 to int4_group128: symmetric integers with one bf16 scale for so many inputs (compressed-tensors
# pack-quantized, symmetric GPTQ); with _zeros, a zero point of four bits beside each scale (AWQ, asymmetric GPTQ).
# int8_group32 to int8_group128: the same of eight bits. _a16: weights alone are narrow, and widened when they are used.
BLOCK_FORMATS = MappingProxyType(
    {
        "fp8_block": BlockFormat("fp8", 128, 128, 4),
        "mxfp8": BlockFormat("fp8", 32, 1, 1),
        "mxfp4": BlockFormat("fp4", 32, 1, 1),
        "nvfp4": BlockFormat("fp4", 16, 1, 1, 4),
        "int4_group32": BlockFormat("int4", 32, 1, 2),
        "int4_group64": BlockFormat("int4", 64, 1, 2),
        "int4_group128": BlockFormat("int4", 128, 1, 2),
        "int4_group32_zeros": BlockFormat("int4", 32, 1, 2, zero_bits=4),
        "int4_group64_zeros": BlockFormat("int4", 64, 1, 2, zero_bits=4),
        "int4_group128_zeros": BlockFormat("int4", 128, 1, 2, zero_bits=4),
        "int8_group32": BlockFormat("w8", 32, 1, 2),
        "int8_group64": BlockFormat("w8", 64, 1, 2),
        "int8_group128": BlockFormat("w8", 128, 1, 2),
        "int8_group32_zeros": BlockFormat("w8", 32, 1, 2, zero_bits=8),
        "int8_group64_zeros": BlockFormat("w8", 64, 1, 2, zero_bits=8),
        "int8_group128_zeros": BlockFormat("w8", 128, 1, 2, zero_bits=8),
        "fp8_a16": BlockFormat("w8", 1, 1, 0),
        "int8_a16": BlockFormat("w8", 1, 1, 0),
        "mxfp4_a16": BlockFormat("w4", 32, 1, 1),
        "nvfp4_a16": BlockFormat("w4", 16, 1, 1, 4),
    }
)


def element_bits(dtype: str) -> int:
    """Return the bits of an element of a plain type, or of what `element_type` returns."""
    return _WIDENED_BITS[dtype] if dtype in _WIDENED_BITS else DTYPE_BITS[dtype]


def n_bytes(elements: Any, dtype: str) -> Any:
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
    return (elements * element_bits(dtype) + 7) // 8


def element_type(dtype: str) -> str:
    """Return the type of a format's elements: what products run in, at the bf16 rate where a chip has none for it."""
    return BLOCK_FORMATS[dtype].element if dtype in BLOCK_FORMATS else dtype


def matrix_bytes(inputs: int, outputs: int, dtype: str) -> int:
    """Return the bytes of a weight matrix of `inputs` rows and `outputs` columns, scales included.

    Examples
    --------
    >>> matrix_bytes(128, 129, "fp8_block"), matrix_bytes(64, 2, "mxfp4"), matrix_bytes(64, 2, "bf16")
    (16520, 68, 256)
    """
    if dtype not in BLOCK_FORMATS:
        return int(n_bytes(inputs * outputs, dtype))
    f = BLOCK_FORMATS[dtype]
    n_scales = -(-inputs // f.rows) * -(-outputs // f.columns)
    zeros = (n_scales * f.zero_bits + 7) // 8
    return int(n_bytes(inputs * outputs, f.element)) + n_scales * f.scale_bytes + zeros + f.matrix_bytes
