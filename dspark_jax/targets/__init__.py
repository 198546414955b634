"""Frozen target models."""
