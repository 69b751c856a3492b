"""`python -m gradsentinel` is the `gradsentinel` command."""

from gradsentinel.cli import main

if __name__ == "__main__":
    main()
