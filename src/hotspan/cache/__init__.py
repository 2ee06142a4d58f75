"""The cache itself: which chunk is where, what is on its way, what goes. Knows tiers and no engine."""
