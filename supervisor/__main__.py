"""`python -m supervisor`: the same command as `supervisor`."""

from supervisor.cli.main import main

if __name__ == "__main__":
    main()
