"""`python -m hostweave` is `hostweave`."""

import sys

from hostweave.cli import main

sys.exit(main())
