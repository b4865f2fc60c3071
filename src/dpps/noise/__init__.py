"""Noise: mechanisms, and where random numbers come from (seeded streams, or a keystream nobody else can know)."""
