"""`python -m stallwatch` and the installed command: the process ends here and nowhere else."""

import os
import sys

from stallwatch import cli


def main() -> None:
    """Runs the command of this process and exits with its status. A bug keeps its traceback and exits 1."""
    sys.exit(cli.main(sys.argv[1:], environ=os.environ, stdout=sys.stdout, stderr=sys.stderr))


if __name__ == "__main__":
    main()
