"""Fixed examples for property-based tests; and this folder on the path, for helpers.py."""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
