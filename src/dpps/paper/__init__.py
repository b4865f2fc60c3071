"""Every table and figure of the paper, computed again and laid beside the published numbers: one short file each."""
