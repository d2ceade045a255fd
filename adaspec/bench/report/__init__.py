"""Runs of ``adaspec bench`` as one page to look at: records -> groups -> measures -> figures -> pictures -> page."""
