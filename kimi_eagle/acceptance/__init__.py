"""Acceptance of a head: simulated from stored states, served by an engine, and the statistics both share."""
