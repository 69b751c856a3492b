"""What an incident turned out to be: cause, place and evidence."""
