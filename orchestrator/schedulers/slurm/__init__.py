"""Nodes as the hosts of a Slurm allocation: what Slurm's commands say, what is submitted, and one agent per host."""
