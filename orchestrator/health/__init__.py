"""Is what runs here well? Readings of processes, host, devices and loss, and what they mean. It decides nothing."""
