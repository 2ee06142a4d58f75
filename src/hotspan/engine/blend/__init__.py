"""Reuse of repeated text that is not a prefix (docs/design/blend.md)."""
