"""Environment variables between the supervisor and the processes that it starts."""

PREFLIGHT = "JAXTRAIN_PREFLIGHT"  # the file with the findings of this start's preflight
LAUNCHED = "JAXTRAIN_LAUNCHED"  # seconds since 1970 at the start of the first attempt
NOTE = "JAXTRAIN_NOTE"  # a file in which an attempt writes why no other should follow
RESTART = "JAXTRAIN_RESTART"  # the number of restarts so far; not set in the first attempt

ATTEMPT_VARIABLES = (RESTART, LAUNCHED, NOTE, PREFLIGHT)
