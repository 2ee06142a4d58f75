"""How much RAM, disk and which L2: chosen from the machine and the model, each figure with its reason."""
