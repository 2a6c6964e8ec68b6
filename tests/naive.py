"""Slow, obvious twins of the fast routines; nothing of the package is imported here.

`simulate` plays a workload (the ``replay`` format) by the letter of ``semantics.md`` §1 and §2. In exact mode every
number is a fraction of the floats that were given, so a disagreement with the kernel is never rounding of ours.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import inf

# Two event times are one instant when they agree to this relative difference.
INSTANT = Fraction(1, 10**12)
# Event times closer than this are equal up to rounding, so float arithmetic groups them as exact arithmetic does.
SAME = Fraction(1, 10**14)


def solve_maxmin(routes, capacities, counts=None, number=Fraction):
    """Return the max-min fair rate of every flow by progressive filling.

    ``routes[f]`` lists the links of flow ``f`` (at least one); ``counts[f]``, parallel to it, says how many times the
    flow's rate loads each of them (once when left out).
    """
    if counts is None:
        counts = [[1] * len(route) for route in routes]
    room = [number(capacity) for capacity in capacities]
    level = number(0)
    rates = [None] * len(routes)
    rising = set(range(len(routes)))
    while rising:
        load = defaultdict(int)
        for flow in rising:
            for link, count in zip(routes[flow], counts[flow], strict=True):
                load[link] += count
        possible = {link: room[link] / load[link] for link in load}
        step = min(possible.values())
        level += step
        for link in load:
            room[link] -= load[link] * step
        saturated = {link for link in load if possible[link] == step}
        for flow in sorted(rising):
            if not saturated.isdisjoint(routes[flow]):
                rates[flow] = level
                rising.remove(flow)
    return rates


def simulate(workload, exact=True):
    """Return ``(makespan, start, finish)`` in seconds: fractions, or floats when ``exact`` is false."""
    start, finish, _ = _play(workload, Fraction if exact else float)
    return max(finish, default=0), start, finish


def simulate_with_gap(workload, exact=True):
    """Return ``(makespan, start, finish, gap)``, the last as `min_event_gap` defines it."""
    start, finish, gap = _play(workload, Fraction if exact else float)
    return max(finish, default=0), start, finish, gap


def min_event_gap(workload):
    """Return the smallest relative distance by which an expected event missed an instant, equal times left out.

    Below about 1e-10 it is rounding that decides whether float arithmetic sees one instant or two.
    """
    return _play(workload, Fraction)[2]


def _play(workload, number):
    links, ops = workload["links"], workload["ops"]
    capacities = [number(link["bw"]) for link in links]
    successors = [[] for _ in ops]
    n_missing = [0] * len(ops)
    for before, after in {tuple(dep) for dep in workload["deps"]}:
        successors[before].append(after)
        n_missing[after] += 1

    now, gap = number(0), inf
    start, finish = [None] * len(ops), [None] * len(ops)
    queue = [[] for _ in range(workload["chips"])]  # ready computes of each chip
    busy = [False] * workload["chips"]
    alarm = {}  # compute -> its end; flow -> the end of its latency
    moving = {}  # flow -> bytes still to move
    ended = []  # ops that end in this instant

    def release(op):
        """All predecessors of `op` have ended."""
        what = ops[op]
        if what["kind"] == "compute":
            queue[what["chip"]].append(op)
            return
        start[op] = now
        wait = number(what.get("lat", 0)) + sum(number(links[link].get("lat", 0)) for link in what["route"])
        if wait > 0:
            alarm[op] = now + wait
        else:
            move(op)

    def move(op):
        """The latency of flow `op` has passed."""
        if ops[op]["route"] and ops[op]["bytes"] > 0:
            moving[op] = number(ops[op]["bytes"])
        else:
            ended.append(op)

    def end(op):
        finish[op] = now
        if ops[op]["kind"] == "compute":
            busy[ops[op]["chip"]] = False
        for after in successors[op]:
            n_missing[after] -= 1
            if n_missing[after] == 0:
                release(after)

    def choose(chip):
        """Free `chip` takes the first of its ready computes."""
        op = min(queue[chip], key=lambda op: (ops[op].get("prio", 0), op))
        queue[chip].remove(op)
        busy[chip] = True
        start[op] = now
        if ops[op]["secs"] > 0:
            alarm[op] = now + number(ops[op]["secs"])
        else:
            ended.append(op)

    for op in [op for op in range(len(ops)) if n_missing[op] == 0]:
        release(op)
    while True:
        while True:  # one instant
            while ended:
                end(ended.pop())
            for chip in range(workload["chips"]):
                if queue[chip] and not busy[chip]:
                    choose(chip)
            if not ended:
                break

        flows = sorted(moving)
        rates = dict(zip(flows, solve_maxmin([ops[f]["route"] for f in flows], capacities, number=number), strict=True))
        expected = alarm | {flow: now + moving[flow] / rates[flow] for flow in flows}
        if not expected:
            break
        then = min(expected.values())
        for date in expected.values():
            if date > then * (1 + number(SAME)) > 0:
                gap = min(gap, (date - then) / then)
        for flow in flows:
            moving[flow] -= rates[flow] * (then - now)
        now = then
        for op in sorted(op for op, date in expected.items() if date <= then * (1 + number(INSTANT))):
            if op in moving:
                del moving[op]
                ended.append(op)
            else:
                del alarm[op]
                if ops[op]["kind"] == "compute":
                    ended.append(op)
                else:
                    move(op)
    return start, finish, gap


# --- A deployment whose sequences are never split: its graph, its costs and its memory, written rank by rank ---------
#
# A model is a plain mapping: hidden, vocab, d_ff, tied (whether the head is the embedding table), layers (a list of
# "dense" and "moe"), attention (kind, heads, kv_heads, head_dim, or for latent attention q_rank, kv_rank, nope, rope,
# v_dim) and moe (experts, top_k, width, shared; None without experts).

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}


def size_bytes(elements, dtype):
    """Whole bytes that hold so many elements."""
    return -(-elements * BITS[dtype] // 8)


def switch_network(n_chips):
    """Return ``(capacity id of every link, route)`` of one switch; ``route(src, dst) = (links, latency id)``."""
    return [0] * (2 * n_chips), lambda src, dst: ([src, n_chips + dst], 0)


def hgx_network(n_chips, per_node):
    """Nodes of ``per_node`` chips with a NIC each, a spine that never blocks; as `switch_network`."""
    n_nics = n_chips if n_chips > per_node else 0

    def route(src, dst):
        if src // per_node == dst // per_node:
            return [src, n_chips + dst], 0
        return [2 * n_chips + src, 2 * n_chips + n_nics + dst], 1

    return [0] * (2 * n_chips) + [1] * (2 * n_nics), route


def stages_of(n_layers, pp):
    """Return the layers of every pipeline stage, dealt out so that the first stages get the odd ones."""
    held = [n_layers // pp] * pp
    for stage in range(n_layers % pp):
        held[stage] += 1
    layers = iter(range(n_layers))
    return [[next(layers) for _ in range(n)] for n in held]


class GraphBuilder:
    """Ops and edges in lists; an op is numbered when it is added, its edges follow."""

    def __init__(self, route):
        self.route = route
        self.ops, self.edges = [], []
        self.durations, self.messages = {}, {}
        self.layer = -1

    def _add(self, src, dst, **op):
        self.ops.append({"src": src, "dst": dst, "layer": self.layer, **op})
        return len(self.ops) - 1

    def _wait(self, after, ops):
        """Each of ``ops`` waits, in each of ``after``, for the op that belongs to its source chip."""
        for ends in after:
            self.edges += [(ends[self.ops[op]["src"]], op) for op in ops]

    def compute(self, chips, after, name, kind, reason):
        """One op on every chip, after the chip's op in each of ``after``; return the op of every chip."""
        cost = self.durations.setdefault((name, kind), len(self.durations))
        added = {chip: self._add(chip, chip, kind="compute", cost=cost, reason=reason, step=0) for chip in chips}
        self._wait(after, added.values())
        return added

    def flows(self, pairs, after, message, reason, step):
        """One message per (source, destination), after what the source waits for; return them in order."""
        cost = self.messages.setdefault(message, len(self.messages))
        added = [self._add(src, dst, kind="flow", cost=cost, reason=reason, step=step) for src, dst in pairs]
        self._wait(after, added)
        return added

    def ring(self, groups, after, message, reason, first_step):
        """Half an all-reduce around each group; return what each chip received last, and what it sent last."""
        pairs = [(chip, group[(i + 1) % len(group)]) for group in groups for i, chip in enumerate(group)]
        for step in range(len(groups[0]) - 1):
            added = self.flows(pairs, after, message, reason, first_step + step)
            received = {dst: op for (_, dst), op in zip(pairs, added, strict=True)}
            sent = {src: op for (src, _), op in zip(pairs, added, strict=True)}
            after = [received, sent]
        return after

    def exchange(self, groups, after, message, reason, step):
        """Everyone to everyone, nearest follower first; return what each chip received, by distance."""
        distances = range(1, len(groups[0]))
        hops = [(g, i, d) for g in groups for i in range(len(g)) for d in distances]
        pairs = [(g[i], g[(i + d) % len(g)]) for g, i, d in hops]
        added = self.flows(pairs, after, message, reason, step)
        received = {d: {} for d in distances}
        for (_, _, d), (_, dst), op in zip(hops, pairs, added, strict=True):
            received[d][dst] = op
        return list(received.values())

    def reduce_scatter(self, groups, after, message, reason, collective, first_step):
        how = self.ring if collective == "ring" else self.exchange
        return how(groups, after, message, reason, first_step)

    def all_gather(self, groups, after, message, reason, collective, first_step):
        if collective == "ring":
            return self.ring(groups, after, message, reason, first_step)[:1]
        return self.exchange(groups, after, message, reason, first_step) + after


def build_graph(model, network, *, dp, tp, pp, ep, rank_order, collective):
    """Return a `GraphBuilder` that holds every op of one forward pass; ``rank_order`` is of dp, tp, pp."""
    b = GraphBuilder(network[1])
    size, stride, step = {"dp": dp, "tp": tp, "pp": pp}, {}, 1
    for axis in rank_order:
        stride[axis], step = step, step * size[axis]

    def chip(d, p, t):
        return d * stride["dp"] + p * stride["pp"] + t * stride["tp"]

    stages = [[chip(d, p, t) for d in range(dp) for t in range(tp)] for p in range(pp)]
    kinds = list(dict.fromkeys(model["layers"]))
    held = [b.compute(stages[0], [], "embed", None, "embed")]
    for p, layers in enumerate(stages_of(len(model["layers"]), pp)):
        if p > 0:
            b.layer = -1
            sent = b.flows(list(zip(stages[p - 1], stages[p], strict=True)), held, "pp", "pp", 0)
            held = [dict(zip(stages[p], sent, strict=True))]
        for layer in layers:
            b.layer = layer
            ffn = model["layers"][layer]
            held = _add_layer(b, stages[p], held, model, ffn, kinds.index(ffn), tp, ep, collective)
    b.layer = -1
    b.compute(stages[-1], held, "lm_head", None, "lm_head")
    return b


def _all_reduce(b, chips, after, tp, collective):
    if tp == 1:
        return after
    groups = [chips[i : i + tp] for i in range(0, len(chips), tp)]
    scattered = b.reduce_scatter(groups, after, "tp_chunk", "tp", collective, 0)
    return b.all_gather(groups, scattered, "tp_chunk", "tp", collective, tp - 1 if collective == "ring" else 1)


def _add_layer(b, chips, held, model, ffn, kind, tp, ep, collective):
    qkv = b.compute(chips, held, "qkv", kind, "qkv")
    attention = b.compute(chips, [qkv], "attention", kind, "attention")
    o_proj = b.compute(chips, [attention], "o_proj", kind, "o_proj")
    held = _all_reduce(b, chips, [o_proj], tp, collective)
    if ffn == "dense":
        held = [b.compute(chips, held, "ffn", kind, "ffn")]
    else:
        held = _add_experts(b, chips, held, model, kind, tp, ep, collective)
    return _all_reduce(b, chips, held, tp, collective)


def _add_experts(b, chips, held, model, kind, tp, ep, collective):
    moe_tp = len(chips) // ep
    sharers = [chips[e * moe_tp : (e + 1) * moe_tp] for e in range(ep)]
    strided = [[group[m] for group in sharers] for m in range(moe_tp)]
    router = b.compute(chips, held, "router", kind, "moe")
    received = [router]
    if moe_tp > tp:
        for ends in b.all_gather(sharers, [router], "ep_gather", "ep", collective, 0):
            if ends is not router:
                received.append(ends)
    if ep > 1:
        received = received + b.exchange(strided, received, "ep_dispatch", "ep", 0)
    if model["moe"]["shared"]:
        received = [*received, b.compute(chips, [router], "shared", kind, "moe")]
    done = [b.compute(chips, received, "experts", kind, "moe")]
    if ep > 1:
        done = done + b.exchange(strided, done, "ep_combine", "ep", 1)
    if moe_tp > tp:
        done = done + b.reduce_scatter(sharers, done, "ep_gather", "ep", collective, 1)
    return done


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
