"""Outputs of the encoders of images, video and sound, kept in the tiers."""
