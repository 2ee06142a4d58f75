"""`python -m hotspan`, the same as `hotspan`."""

from hotspan.cli.main import main

if __name__ == "__main__":
    main()
