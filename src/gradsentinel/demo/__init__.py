"""The demonstration: a small language model that is made to fail, with and without GradSentinel."""
