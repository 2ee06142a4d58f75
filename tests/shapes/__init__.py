"""Every shape of engine, whoever starts it: the same answers as without hotspan, or refused in words. `make shapes`."""
