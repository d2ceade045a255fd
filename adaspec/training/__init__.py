"""Distilling drafters: a target's own output, with its features, becomes the weights of a feature drafter."""
