"""python -m pyctl"""

from __future__ import annotations

import sys

from pyctl.cli import main

sys.exit(main())
