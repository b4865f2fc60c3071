"""One run: its folder, log, checkpoints, and where it is carried out."""
