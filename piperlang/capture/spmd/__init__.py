"""The graphs of a sharded chunk, as one device runs them."""
