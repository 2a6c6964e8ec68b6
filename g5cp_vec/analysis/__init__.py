"""What a finished sweep says: verdicts, summaries, estimates. Reads datasets and grids, simulates nothing."""
