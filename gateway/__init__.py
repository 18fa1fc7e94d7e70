"""Weir's gateway: between OpenAI-compatible clients and a fleet of vLLM engines."""

__version__ = "0.1.0"
