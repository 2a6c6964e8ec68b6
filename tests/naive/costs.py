"""Costs and memory of a rank whose sequences are never split; models are those of `naive.graph`."""

from __future__ import annotations

from naive.graph import stages_of

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}


def size_bytes(elements, dtype):
    """Whole bytes that hold so many elements."""
    return -(-elements * BITS[dtype] // 8)


# Weights of these types are multiplied with inputs of their own type, on the chips that the twins are compared on.
NARROW = ("fp8",)


def product(rows, inner, columns, weights, activations, n_weights=1, *, quantised_before=False):
    """A matrix product as ``[(unit, flops, bytes, dtype), ...]``: one multiply-add per term, every operand once.

    ``weights`` and ``activations`` are element types; the rows are spread over ``n_weights`` matrices of one shape.
    Inputs that have to become narrower are read and written once more before, unless another product has done so.
    """
    flops = sum(2 * inner * columns for _ in range(rows))
    moved = size_bytes(rows * (inner + columns), activations) + n_weights * size_bytes(inner * columns, weights)
    if weights not in NARROW:
        return [("gemm", flops, moved, weights)]
    moved -= size_bytes(rows * inner, activations) - size_bytes(rows * inner, weights)
    quantised = size_bytes(rows * inner, activations) + size_bytes(rows * inner, weights)
    before = [] if quantised_before else [("memory", 0, quantised, activations)]
    return [*before, ("gemm", flops, moved, weights)]


def causal_flops(heads, width, new, cached):
    """Attention of ``new`` tokens, one at a time: two FLOPs per element of key and value and pair.

    ``width`` is d_qk + d_v. A token attends all before it, and itself by half: the diagonal is split evenly.
    """
    return sum(heads * width * (2 * (cached + before) + 1) for before in range(new))


def ring_step_flops(heads, width, new, cached, cp, rank, step):
    """One rank's share of `causal_flops` in one ring step of the head-tail split, pair of tokens by pair of tokens.

    Rank r keeps chunks r and 2 cp - 1 - r of the 2 cp chunks of the new tokens, and the r-th part of the cached ones;
    in step s it attends what rank r - s keeps.
    """
    chunk, owner = new // (2 * cp), (rank - step) % cp
    mine = [c * chunk + i for c in (rank, 2 * cp - 1 - rank) for i in range(chunk)]
    theirs = [c * chunk + i for c in (owner, 2 * cp - 1 - owner) for i in range(chunk)]
    doubled_pairs = sum((query > key) * 2 + (query == key) for query in mine for key in theirs)
    doubled_pairs += 2 * len(mine) * (cached // cp)
    return heads * width * doubled_pairs


def expert_rows(tokens_per_replica, dp, top_k, ep):
    """Rows of a message between two EP ranks: each holds an ep-th of the tokens, and sends an ep-th of those."""
    return -(-dp * tokens_per_replica * top_k // ep**2)


def op_costs(model, phase, types, *, dp, tp, ep, batch, seq_len, cached):
    """Return ``{(op, layer kind): [(unit, flops, bytes, dtype), ...]}`` of one rank.

    ``types`` names the element types of ``weights``, ``ffn`` weights, the ``kv`` cache and ``activations``.
    """
    new = 1 if phase == "decode" else seq_len - cached
    context = seq_len
    tokens, hidden, act = batch * new, model["hidden"], types["activations"]

    def memory(*elements, dtype=act):
        return "memory", 0, size_bytes(sum(elements), dtype), act

    def mlp(rows, width, n_weights=1):
        return [
            *product(rows, hidden, 2 * width, types["ffn"], act, n_weights),
            memory(rows * width, rows * width, rows * width),  # gate and up in, their product out
            *product(rows, width, hidden, types["ffn"], act, n_weights),
        ]

    # Residual and update in, their sum and its norm out.
    norm = memory(*4 * [tokens * hidden])
    costs = {
        ("embed", None): [memory(*2 * [tokens * hidden])],
        ("lm_head", None): [
            memory(*2 * [batch * hidden]),
            *product(batch, hidden, -(-model["vocab"] // tp), act, act),
        ],
    }
    for kind, ffn in enumerate(dict.fromkeys(model["layers"])):
        attention = _attention_costs(model, phase, types, tp, batch, tokens, new, context)
        for name, parts in attention.items():
            costs[name, kind] = [norm, *parts] if name == "qkv" else parts
        if ffn == "dense":
            costs["ffn", kind] = [norm, *mlp(tokens, model["d_ff"] // tp)]
            continue
        moe = model["moe"]
        rows = ep * expert_rows(tokens, dp, moe["top_k"], ep)
        costs["router", kind] = [norm, *product(tokens, hidden, moe["experts"], act, act)]
        costs["experts", kind] = mlp(rows, moe["width"] * ep // (dp * tp), min(rows, moe["experts"] // ep))
        if moe["shared"]:
            costs["shared", kind] = mlp(tokens, moe["shared"] * moe["width"] // tp)
    return costs


def _attention_costs(model, phase, types, tp, batch, tokens, new, context):
    a, hidden, act, weights = model["attention"], model["hidden"], types["activations"], types["weights"]
    heads = a["heads"] // tp

    def memory(elements, dtype=act):
        return "memory", 0, size_bytes(elements, dtype), act

    def per_head(inner, columns):
        """One product per head, each with a matrix of its own."""
        return product(tokens * heads, inner, columns, weights, act, heads)

    if a["kind"] == "gqa":
        kv_heads, d = max(1, a["kv_heads"] // tp), a["head_dim"]
        cached_elements = 2 * kv_heads * d
        d_qk = d_v = d
        kv_read = 2 * kv_heads * d
        qkv = product(tokens, hidden, (heads + 2 * kv_heads) * d, weights, act)
        rotated = (heads + kv_heads) * d
        o_proj = []
    else:
        cached_elements = a["kv_rank"] + a["rope"]
        d_qk, d_v = a["nope"] + a["rope"], a["v_dim"]
        kv_read = heads * (d_qk + d_v)
        qkv = product(tokens, hidden, cached_elements, weights, act)
        if a["q_rank"] is None:
            qkv += product(tokens, hidden, heads * d_qk, weights, act, quantised_before=True)
        else:
            qkv += product(tokens, hidden, a["q_rank"], weights, act, quantised_before=True)
            qkv += product(tokens, a["q_rank"], heads * d_qk, weights, act)
        qkv.append(memory(2 * tokens * (a["kv_rank"] + (a["q_rank"] or 0))))  # norms of the latents
        rotated = (heads + 1) * a["rope"]
        if phase == "prefill":
            qkv += product(batch * context, a["kv_rank"], heads * (a["nope"] + d_v), weights, act)
            o_proj = []
        else:
            qkv += per_head(a["nope"], a["kv_rank"])
            o_proj = per_head(a["kv_rank"], a["v_dim"])
    o_proj += product(tokens, heads * d_v, hidden, weights, act)
    qkv.append(memory(2 * tokens * rotated))
    qkv.append(memory(tokens * cached_elements, types["kv"]))
    if phase == "prefill":
        flops = batch * causal_flops(heads, d_qk + d_v, new, context - new)
        moved = size_bytes(tokens * heads * (d_qk + d_v) + batch * context * kv_read, act)
    else:
        if a["kind"] == "mla":  # absorbed: queries and outputs are latents
            d_qk, d_v = cached_elements, a["kv_rank"]
        flops = batch * sum(2 * heads * (d_qk + d_v) for _ in range(context))
        moved = size_bytes(batch * context * cached_elements, types["kv"])
        moved += size_bytes(batch * heads * (d_qk + d_v), act)
    return {"qkv": qkv, "attention": [("attention", flops, moved, act)], "o_proj": o_proj}


def message_sizes(model, types, *, dp, tp, ep, batch, new):
    """Return the bytes of every message, by the name that flows carry."""
    hidden, act = batch * new * model["hidden"], types["activations"]
    sizes = {"tp_chunk": -(-size_bytes(hidden, act) // tp), "pp": size_bytes(hidden, act)}
    if model["moe"]:
        rows = expert_rows(batch * new, dp, model["moe"]["top_k"], ep)
        sizes["ep_dispatch"] = sizes["ep_combine"] = size_bytes(rows * model["hidden"], act)
        sizes["ep_gather"] = size_bytes(-(-batch * new // tp) * model["hidden"], act)
    return sizes


def weight_tensors(model, types, *, dp, tp, ep, ffn):
    """Yield ``(name, shape, dtype)`` of every tensor that one rank holds of one layer."""
    a, hidden = model["attention"], model["hidden"]
    weights, act = types["weights"], types["activations"]
    heads = a["heads"] // tp
    yield "attention norm", (hidden,), act
    yield "ffn norm", (hidden,), act
    if a["kind"] == "gqa":
        kv_heads, d = max(1, a["kv_heads"] // tp), a["head_dim"]
        yield "q_proj", (hidden, heads * d), weights
        yield "k_proj", (hidden, kv_heads * d), weights
        yield "v_proj", (hidden, kv_heads * d), weights
        yield "o_proj", (heads * d, hidden), weights
    else:
        if a["q_rank"] is None:
            yield "q_proj", (hidden, heads * (a["nope"] + a["rope"])), weights
        else:
            yield "q_a_proj", (hidden, a["q_rank"]), weights
            yield "q_a_norm", (a["q_rank"],), act
            yield "q_b_proj", (a["q_rank"], heads * (a["nope"] + a["rope"])), weights
        yield "kv_a_proj", (hidden, a["kv_rank"] + a["rope"]), weights
        yield "kv_a_norm", (a["kv_rank"],), act
        yield "kv_b_proj", (a["kv_rank"], heads * (a["nope"] + a["v_dim"])), weights
        yield "o_proj", (heads * a["v_dim"], hidden), weights
    if ffn == "dense":
        experts = [("ffn", model["d_ff"] // tp)]
    else:
        moe, moe_tp = model["moe"], dp * tp // ep
        yield "router", (hidden, moe["experts"]), act
        experts = [(f"expert {i}", moe["width"] // moe_tp) for i in range(moe["experts"] // ep)]
        if moe["shared"]:
            experts.append(("shared", moe["shared"] * moe["width"] // tp))
    for name, width in experts:
        yield f"{name} gate", (hidden, width), types["ffn"]
        yield f"{name} up", (hidden, width), types["ffn"]
        yield f"{name} down", (width, hidden), types["ffn"]


def memory_of(model, phase, types, *, dp, tp, pp, ep, batch, seq_len, cached):
    """Return weights, cache and activations (bytes) of a rank of the fullest stage."""
    act, hidden, a = types["activations"], model["hidden"], model["attention"]
    heads, tokens = a["heads"] // tp, batch * (1 if phase == "decode" else seq_len - cached)
    if a["kind"] == "gqa":
        cached_elements = 2 * max(1, a["kv_heads"] // tp) * a["head_dim"]
        qkv = heads * a["head_dim"] + cached_elements
    else:
        cached_elements = a["kv_rank"] + a["rope"]
        qkv = heads * (2 * (a["nope"] + a["rope"]) + a["v_dim"])
    fullest = None
    for number, layers in enumerate(stages_of(len(model["layers"]), pp)):
        tensors = [t for i in layers for t in weight_tensors(model, types, dp=dp, tp=tp, ep=ep, ffn=model["layers"][i])]
        if number == 0:
            tensors.append(("embedding", (model["vocab"], hidden), act))
        if number == pp - 1:
            tensors.append(("final norm", (hidden,), act))
            if not (model["tied"] and pp == 1):
                tensors.append(("head", (-(-model["vocab"] // tp), hidden), act))
        weights = 0
        for _, shape, dtype in tensors:
            n = 1
            for size in shape:
                n *= size
            weights += size_bytes(n, dtype)
        cache = sum(size_bytes(batch * seq_len * cached_elements, types["kv"]) for _ in layers)
        widest = max(
            max(qkv, 2 * model["d_ff"] // tp if model["layers"][i] == "dense" else model["moe"]["top_k"] * hidden)
            for i in layers
        )
        stage = (weights, cache, size_bytes(tokens * (2 * hidden + widest), act))
        if fullest is None or sum(stage) > sum(fullest):
            fullest = stage
    return fullest
