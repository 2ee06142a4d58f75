"""Figures of docs/benchmarks.md, measured side by side; each module is a command."""
