"""Measurement scripts, their frozen inputs and the results that they printed.

Runs from a checkout (`python -m profiles.NAME`), is never part of the wheel; nothing imports it.
"""
