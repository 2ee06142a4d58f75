"""What `model.py` files written for LMI import, served by hotspan; no part of LMI's own djl_python is in it."""
