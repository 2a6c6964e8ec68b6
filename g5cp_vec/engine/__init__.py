"""The numba room: arrays in, arrays and an integer status out; it knows nothing of models or files."""
