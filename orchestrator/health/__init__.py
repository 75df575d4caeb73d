"""Is what runs here well? Readings of processes and of the host, and what they mean. Nothing is decided here."""
