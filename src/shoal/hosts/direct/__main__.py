"""`python -m shoal.hosts.direct`: one worker of the direct data plane, as the supervisor starts it."""

import sys

from shoal.hosts.direct.worker import main

sys.exit(main())
