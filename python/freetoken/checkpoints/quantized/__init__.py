"""Checkpoints that keep a quantised tensor in several: one file for each scheme."""
