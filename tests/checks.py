"""What holds of every deployment: conserved, reduced exactly, and as the closed form has it where flows meet nobody.

And how one is refused.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from test_acceptance_tools import deploy, play_point, priced
from test_audit import SOUND

from g5cp_vec.audit.conservation import audit
from g5cp_vec.cost.math_path import math_times
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template

SEQ_LEN = 4096


@contextmanager
def refused(message):
    """What is done within is refused, in one line that has this text."""
    with pytest.raises(InfeasibleError) as caught:
        yield
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def assert_conserved_and_reduced_exactly(dep):
    structure = build_structure(dep)
    rows = priced(dep, structure, SEQ_LEN)
    start, finish = simulate_point(Template(structure, reduced=False), rows, 0)
    assert audit(dep, structure, SEQ_LEN, 1, 0, start, finish) == SOUND
    reduced = simulate_point(Template(structure, reduced=True), rows, 0)
    np.testing.assert_allclose(reduced, (start, finish), rtol=0, atol=1e-11 * finish.max())


def assert_closed_form(keys, n_chips):
    """The closed form is the simulation; return the latter's deployment and the seconds."""
    closed = closed_form(deploy(path="math", **keys), n_chips).step_s[0]
    simulated = deploy(**keys)
    assert play_point(simulated, SEQ_LEN) == pytest.approx(closed, rel=1e-9, abs=0)
    return simulated, closed


def closed_form(dep, n_chips):
    load = build_load(dep, *(np.array([n], np.int64) for n in (SEQ_LEN, 1, 0)))
    return math_times(dep, build_network(dep.topology, n_chips), load, 1)


def assert_direct_exchange(topology, n_messages, bytes_per_s):
    """Four shards all to all: the busiest link carries so many of their messages at so many bytes/s."""
    dep, closed = assert_closed_form({"tp": 4, "topology": topology, "collective": "direct"}, 4)
    (chunk,) = priced(dep, build_structure(dep), SEQ_LEN).bytes[0]
    # Two layers, two all-reduces each, of two halves.
    exchanged = closed - closed_form(dep, 4).compute_s[0]
    assert exchanged == pytest.approx(8 * n_messages * chunk / bytes_per_s, rel=1e-9)
