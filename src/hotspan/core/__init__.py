"""Types, keys, the frame format, errors and the clock: pure, imports nothing of the rest."""
