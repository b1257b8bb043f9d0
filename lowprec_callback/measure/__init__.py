"""Facts from a live run. Needs torch."""
