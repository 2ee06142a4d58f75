"""The keys of encryption at rest: each tenant has random ones, wrapped by one key-encryption key."""
