"""Makes tests/scripted_model.py importable as mlx_lm.models.scripted in any process with this folder on PYTHONPATH.

mlx_lm loads a draft model without trust_remote_code, so a `model_file` cannot reach it; an architecture it can import
can. Lazy: nothing of mlx is imported until mlx_lm asks for the name. In the tests' own process: import
tests.site.sitecustomize, then mlx_lm.load(folder).
"""

import importlib.util
import sys
from pathlib import Path

NAME = "mlx_lm.models.scripted"
FILE = Path(__file__).parent.parent / "scripted_model.py"


class ScriptedFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, FILE) if name == NAME else None


sys.meta_path.append(ScriptedFinder)
