"""The helpers beside the tests import each other by their plain names, also as programs of their own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
