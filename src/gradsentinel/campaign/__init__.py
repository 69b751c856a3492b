"""The campaign: the same runs under the same faults, guarded in several ways, and what became of them."""
