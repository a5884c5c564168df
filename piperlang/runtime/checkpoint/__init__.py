"""Checkpoints: the state of training by weight and index range, never by rank, so that any schedule can read them."""
