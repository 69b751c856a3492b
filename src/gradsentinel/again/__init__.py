"""The step in flight, and computing it again."""
