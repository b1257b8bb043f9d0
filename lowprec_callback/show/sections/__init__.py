"""The console page, a section a file: each is a function from a Report and a width to rich renderables.

A section with nothing to say returns an empty list; the page then leaves it out. A section never shortens a
text: what does not fit is wrapped.
"""
