"""Committed measurements: each prints one JSON line a case."""
