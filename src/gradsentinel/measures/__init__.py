"""Numbers about tensors and series: norms, magnitudes, what to expect next."""
