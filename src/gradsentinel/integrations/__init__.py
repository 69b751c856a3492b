"""Adapters for training frameworks; each imports its framework when it is used, and not before."""
