import sys

from hostweave.cli.main import main

if __name__ == "__main__":  # the documentation imports every module
    sys.exit(main())
