"""What the campaign trains."""
