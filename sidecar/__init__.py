"""Weir's sidecar: decides which models are resident on one machine's GPUs."""

__version__ = "0.1.0"  # the gateway's: one distribution has both
