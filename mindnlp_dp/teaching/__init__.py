"""How it works, to run and to count: the algorithms of the textbooks, and the laws of speed-up."""
