"""Audits of passes: each is simulated once more, keeping the times of every op, and what is reported is checked."""

from __future__ import annotations

from g5cp_vec.audit.conservation import Kpis, audit
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.rows import CostRows
from g5cp_vec.errors import SimulationError
from g5cp_vec.runner.passes import Passes
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template


def audit_pass(
    dep: Deployment, template: Template, costs: CostRows, row: int, passes: Passes, number: int, reported_s: float
) -> Kpis:
    """Return the conservation KPIs of one pass.

    Parameters
    ----------
    dep : Deployment
    template : Template
    costs : CostRows
    row : int
        Of ``costs``.
    passes : Passes
    number : int
        Of the pass.
    reported_s : float
        How long the pass takes in the results (s).

    Raises
    ------
    SimulationError
        The pass that is audited ends at another time than the one that is reported.
    """
    start_s, finish_s = simulate_point(template, costs, row)
    end_s = finish_s.max()
    if abs(end_s - reported_s) > 1e-12 * reported_s:
        raise SimulationError(f"step_s: {reported_s!r} reported, but the ops end at {end_s!r}")
    seq_len, batch, cached = (int(values[number]) for values in passes.load)
    return audit(dep, template.structure, seq_len, batch, cached, start_s, finish_s)
