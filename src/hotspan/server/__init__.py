"""The HTTP server of one replica: its socket, its life from start to drain, hotspan's own routes."""
