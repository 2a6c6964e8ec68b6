"""Ways of distributing attention over the cp group: one file each, and the tables that name them.

A form is a function ``(builder, ranks, ready, keys, kind) -> done``: it adds the attention of one layer for the
ranks of a stage, shape (dp, cp, tp), given the op ids after which projections are ready, and returns the op ids
after which the attention output is. ``kind`` is the index of the layer kind and goes into the cost keys.
A name with a suffix is the form as a particular runtime runs it.
"""

from __future__ import annotations

from collections.abc import Callable

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.mapping.forms.pass_kv import pass_kv, pass_kv_blocking, pass_kv_blocking_slowed, pass_kv_slowed
from g5cp_vec.mapping.forms.pass_q import pass_q
from g5cp_vec.mapping.forms.pass_q_ring import pass_q_ring, pass_q_ring_serial
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids

Form = Callable[[BlockBuilder, Ids, Ids, CostKeys, int], Ids]

PREFILL_FORMS: dict[str, Form] = {
    "pass_kv": pass_kv,
    "pass_kv_blocking": pass_kv_blocking,
    "pass_kv_slowed": pass_kv_slowed,
    "pass_kv_blocking_slowed": pass_kv_blocking_slowed,
}
DECODE_FORMS: dict[str, Form] = {
    "pass_q": pass_q,
    "pass_q_ring": pass_q_ring,
    "pass_q_ring_serial": pass_q_ring_serial,
}


def form_name(dep: Deployment) -> str | None:
    """Return the name of the form that a deployment's runtime makes of its attention; None where nothing is split."""
    if dep.sequence_ranks == 1:
        return None
    form, runtime = dep.prefill_form or dep.decode_form, dep.runtime
    if form == "pass_kv":
        return "pass_kv" + "_blocking" * (runtime.ring_step_sync_s > 0) + "_slowed" * (runtime.overlap_slowdown > 0)
    if form == "pass_q_ring" and runtime.decode_serial:
        return "pass_q_ring_serial"
    return form
