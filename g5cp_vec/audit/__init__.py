"""Conservation: what a deployment promises against what the recorded times of its operations say.

Nothing here is shared with the simulation kernel: `promises` counts bytes and FLOPs of the whole deployment in closed
form, `ring` follows the K/V blocks along the recorded sends, `sharing` solves the bandwidth shares again, and
`conservation` turns the differences into six numbers that are 0 for a sound simulation.
"""
