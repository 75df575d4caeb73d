"""Is what runs here well? Readings of processes, the host and the loss, and what they mean. Nothing is decided here."""
