"""Attention backends: `base.py` is the contract, the other modules implement it."""
