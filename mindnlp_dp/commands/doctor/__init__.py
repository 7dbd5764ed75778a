"""The command ``mindnlp-dp doctor``, which checks the machine and the installation and prints what to fix."""
