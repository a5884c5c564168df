"""Running graphs and plans."""
