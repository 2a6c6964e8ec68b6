"""From measured kernels to a chip's calibration: reading tables, fitting surfaces, judging predictions."""
