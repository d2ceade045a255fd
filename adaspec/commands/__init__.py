"""One module per command: ``add`` describes it, ``run`` does it. Heavy imports happen when it runs."""
