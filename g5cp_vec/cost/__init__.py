"""What ops cost: exact FLOP and byte counts, durations by roofline, the closed form for cp = 1."""
