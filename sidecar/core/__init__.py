"""Decisions of the sidecar: synchronous, without a clock, I/O or logging."""
