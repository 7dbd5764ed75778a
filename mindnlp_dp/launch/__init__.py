"""Start and end the processes of a job. Contains no training code."""
