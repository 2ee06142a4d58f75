"""What makes the documentation site from docs/: `make site`."""
