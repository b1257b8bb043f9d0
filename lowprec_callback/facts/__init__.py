"""The kinds of facts that a Recording holds, by what they are about."""
