"""A deployment becomes an operation graph: ranks, networks, layers, collectives, attention forms, memory."""
