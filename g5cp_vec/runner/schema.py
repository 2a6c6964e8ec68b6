"""Columns of a result, their types and meanings; the order here is the order in Parquet.

Seconds are float64, bytes int64; a column that does not apply to a point, or to an invalid one, is null.
"""

from __future__ import annotations

import polars as pl

_TEXT, _INT, _REAL, _FLAG = pl.String, pl.Int64, pl.Float64, pl.Boolean

# Columns that name the point, before the keys of the grid.
HEAD = {"point_id": _TEXT, "row": _INT, "status": _TEXT, "reason": _TEXT}

KEY_TYPES = {
    "phase": _TEXT, "path": _TEXT, "model": _TEXT, "chip": _TEXT, "topology": _TEXT, "runtime": _TEXT,
    "n_chips": _INT, "dp": _INT, "tp": _INT, "pp": _INT, "cp": _INT, "pcp": _INT, "dcp": _INT,
    "cp_semantics": _TEXT, "interleave": _INT, "block_size": _INT, "ep": _INT, "moe_dispatch": _TEXT,
    "seq_len": _INT, "batch": _INT, "cached_tokens": _INT, "chunk_tokens": _INT,
    "max_num_batched_tokens": _INT, "max_num_seqs": _INT, "max_model_len": _INT,
    "prefill_form": _TEXT, "decode_form": _TEXT, "collective": _TEXT, "tp_sp": _FLAG, "rank_order": _TEXT,
    "dtype": _TEXT, "ffn_dtype": _TEXT, "kv_dtype": _TEXT, "activation_dtype": _TEXT,
}  # fmt: skip

RESULTS = {
    "ttft_s": _REAL, "tpot_s": _REAL, "step_s": _REAL, "compute_s": _REAL, "attention_s": _REAL,
    "overhead_s": _REAL, "comm_s": _REAL, "exposed_comm_s": _REAL, "overlap_ratio": _REAL,
    "ring_s": _REAL, "ring_compute_s": _REAL, "ring_comm_s": _REAL,
    "kv_bytes": _INT, "weight_bytes": _INT, "activation_bytes": _INT, "buffer_bytes": _INT, "peak_bytes": _INT,
    "hbm_bytes": _INT, "fits": _FLAG, "max_seq_len": _INT, "max_concurrent_seqs": _INT,
    "passkv_bytes": _INT, "passq_query_bytes": _INT, "passq_reduce_bytes": _INT,
    "pcp_bytes": _INT, "dcp_bytes": _INT, "tp_bytes": _INT, "ep_bytes": _INT, "pp_bytes": _INT,
    "n_passes": _INT, "chosen_collective": _TEXT,
    "padded_seq_len": _INT, "peak_ring_blocks": _INT, "bottleneck_link": _TEXT, "bottleneck_utilisation": _REAL,
    "mfu": _REAL, "tokens_per_s_per_chip": _REAL, "n_ops": _INT, "n_ops_simulated": _INT, "n_events": _INT,
}  # fmt: skip

KPIS = (
    "lost_ops", "lost_bytes", "lost_kv_blocks", "lost_flops", "order_violations", "capacity_violations",
)  # fmt: skip

TAIL = {
    "calibrated": _FLAG, "uncalibrated_parts": _TEXT, "extrapolated": _REAL, "unmeasured_collectives": _TEXT,
    "g5cp_version": _TEXT,
}  # fmt: skip

SCHEMA: dict[str, type[pl.DataType]] = {**HEAD, **KEY_TYPES, **RESULTS, **dict.fromkeys(KPIS, _INT), **TAIL}
