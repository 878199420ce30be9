"""Rules of the transitions, for each recorded operation."""
