"""Risky operations and settings, found in one dry step before the training begins."""
