"""The ``mindnlp-dp`` command (main.py), with a folder for each subcommand that has more than one file."""
