"""`python -m shoal.hosts.extproc`: one picker worker, as the supervisor starts it."""

import sys

from shoal.hosts.extproc.worker import main

sys.exit(main())
