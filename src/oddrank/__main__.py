"""`python -m oddrank`: the same as the `oddrank` command."""

from oddrank.cli import main

if __name__ == "__main__":
    main()
