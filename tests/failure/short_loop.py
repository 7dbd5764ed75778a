"""Run a loop of homework/ on a third of its phrases, which is enough to compare two loops.

msrun ... tests/failure/short_loop.py homework/loop_mindspore.py
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    script = Path(sys.argv.pop(1))
    sys.path.insert(0, str(script.parent))
    import phrases

    phrases.NUM_TRAIN //= 3
    runpy.run_path(str(script), run_name="__main__")
