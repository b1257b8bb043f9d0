"""A Report for people: console page and plots."""
