"""Which replica serves a request: a policy in seconds, what replicas hold, and the HTTP router that asks both."""
