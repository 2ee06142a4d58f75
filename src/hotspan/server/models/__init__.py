"""Several models behind one port: a server each, its share of the machine, and the front that knows which is meant."""
