"""Short trainings that choose between forms of a norm before one is built into the library. See README.md."""
