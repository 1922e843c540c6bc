"""`python -m gemsmith`: the command line."""

from gemsmith.cli import main

if __name__ == "__main__":
    main()
