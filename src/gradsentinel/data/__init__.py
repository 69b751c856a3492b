"""Batches and their records: told apart, left out, and found again after a restart."""
