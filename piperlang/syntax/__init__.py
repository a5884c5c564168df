"""Text to syntax tree, and back to text in one canonical layout."""
