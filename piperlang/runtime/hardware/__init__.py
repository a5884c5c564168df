"""What a kind of device provides: streams, and how its memory is measured."""
