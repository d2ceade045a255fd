"""Foreign engines: each module imports its own engine and nothing else does."""
