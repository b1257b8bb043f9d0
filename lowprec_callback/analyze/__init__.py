"""Pure functions from Recording to Report. No torch here."""
