"""`python -m jaxtrain` lists the commands."""

import sys

from jaxtrain import commands

if __name__ == "__main__":
    sys.exit(commands.main(sys.argv[1:]))
