"""`python -m covey` is `covey`."""

import sys

from covey.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
