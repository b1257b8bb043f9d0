"""Models to try lowprec_callback on."""
