"""The ``mindnlp-dp`` command, with a folder for each subcommand that has more than one file.

main.py parses the arguments and calls the function of a subcommand; read it first.
"""
