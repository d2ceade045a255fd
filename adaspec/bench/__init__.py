"""Measuring. The only place that may import everything; nothing imports it."""
