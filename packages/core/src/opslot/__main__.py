import sys

from opslot.tools.cli import main

sys.exit(main())
