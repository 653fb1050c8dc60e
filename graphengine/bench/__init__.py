"""Paired measurements of one engine with speculation off and on, and of a peer beside it."""
