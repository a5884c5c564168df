"""The user's optimizer on the shards of a device."""
