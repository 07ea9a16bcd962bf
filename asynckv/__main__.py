"""``python -m asynckv`` is the ``asynckv`` command."""

import sys

from asynckv.cli import main

sys.exit(main())
