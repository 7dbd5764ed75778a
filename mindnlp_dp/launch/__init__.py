"""Start and end the processes of a job, and detect which launcher started this one. Contains no training code."""
