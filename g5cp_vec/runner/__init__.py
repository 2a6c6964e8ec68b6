"""From points to results: planning, simulation of batches, storage."""
