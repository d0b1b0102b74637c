"""Environment variables between the supervisor and the processes that it starts."""

COMMIT = "JAXTRAIN_COMMIT"  # of the repository; empty without a checkout
DIRTY = "JAXTRAIN_DIRTY"  # "yes" or "no": changes since the commit; empty without a checkout
PREFLIGHT = "JAXTRAIN_PREFLIGHT"  # the file with the findings of this start's preflight
LAUNCHED = "JAXTRAIN_LAUNCHED"  # seconds since 1970 at the start of the first attempt
NOTE = "JAXTRAIN_NOTE"  # a file in which an attempt writes why no other should follow
RESTART = "JAXTRAIN_RESTART"  # the number of restarts so far; not set in the first attempt
EXPECTED = "JAXTRAIN_EXPECTED"  # commit and changes on the node that started the run, for the other nodes

OF_AN_ATTEMPT = (RESTART, LAUNCHED, NOTE, PREFLIGHT)
