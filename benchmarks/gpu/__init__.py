"""Trained models on a GPU."""
