"""The graph of a deployment whose sequences are never split, written rank by rank.

A model is a plain mapping: hidden, vocab, d_ff, tied (whether the head is the embedding table), layers (a list of
"dense" and "moe"), attention (kind, heads, kv_heads, head_dim, or for latent attention q_rank, kv_rank, nope, rope,
v_dim) and moe (experts, top_k, width, shared; None without experts).
"""

from __future__ import annotations


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
