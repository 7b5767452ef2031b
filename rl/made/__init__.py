"""Models that experiments make for themselves, by name, in the cache of the demo's models."""
