"""The training state: copied, checked, kept in memory and on disk, and put back bit for bit."""
