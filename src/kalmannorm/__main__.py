"""`python -m kalmannorm` is the command `kalmannorm`, as torchrun starts it."""

from kalmannorm.cli import main

if __name__ == "__main__":
    main()
