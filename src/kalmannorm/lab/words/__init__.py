"""How numbers, methods and rows are written in the terminal, in tables and on the page."""
