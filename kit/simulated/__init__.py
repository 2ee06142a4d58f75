"""Stores, clocks and disks that run in simulated time."""
