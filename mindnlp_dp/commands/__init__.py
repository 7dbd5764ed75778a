"""Teaching code: the textbook algorithms of all-reduce and the laws of speed-up, to run and to measure."""
