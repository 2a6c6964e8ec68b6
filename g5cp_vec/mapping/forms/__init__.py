"""Ways of distributing attention over the cp group: one file each, and the tables that name them.

A form is a function ``(builder, ranks, ready, keys, kind) -> done``: it adds the attention of one layer for the
ranks of a stage, shape (dp, cp, tp), given the op ids after which projections are ready, and returns the op ids
after which the attention output is. ``kind`` is the index of the layer kind and goes into the cost keys.
"""

from __future__ import annotations

from collections.abc import Callable

from g5cp_vec.mapping.forms.pass_kv import pass_kv
from g5cp_vec.mapping.forms.pass_q import pass_q
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids

Form = Callable[[BlockBuilder, Ids, Ids, CostKeys, int], Ids]

PREFILL_FORMS: dict[str, Form] = {"pass_kv": pass_kv}
DECODE_FORMS: dict[str, Form] = {"pass_q": pass_q}
