"""The training graph: what is computed and communicated, where, and in which order. No torch here."""
