"""Errors of the command line, each with a message for the person who typed the command."""

from __future__ import annotations


class Mistake(Exception):
    """Something a person can correct; each line says what and where."""


class Impossible(Exception):
    """Order or question that cannot be carried out; the message says why and what to do."""
