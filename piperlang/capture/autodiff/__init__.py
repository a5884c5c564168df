"""Chunks, and the F, B, I and W graphs of each."""
