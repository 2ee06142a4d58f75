"""HTTP for all that serve it: heads, bodies, exchanges, connections with limits, and requests to other servers."""
