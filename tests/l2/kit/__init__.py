"""What every L2 back end must do. stores.py says how a back end derives its tests."""
