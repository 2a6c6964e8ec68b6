"""What a user writes, checked once and frozen afterwards.

``model`` (what is served), ``chip`` and ``topology`` (where), ``runtime`` (the software stack), ``deployment`` (how the
model is split over the chips) and ``grid`` (many deployments and loads at once). Every quantity leaves this room in SI
units, every wrong file leaves it as one :class:`~g5cp_vec.errors.ConfigError` that lists all complaints.
"""
