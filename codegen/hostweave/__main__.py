"""`python -m hostweave` is `hostweave`."""

import sys

from hostweave.cli.main import main

sys.exit(main())
