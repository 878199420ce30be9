"""`python -m kalmannorm` is the command `kalmannorm`, as torchrun starts it."""

from kalmannorm_command import main

if __name__ == "__main__":
    main()
