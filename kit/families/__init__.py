"""Small models of the families that hotspan is tried with, made on the spot."""
