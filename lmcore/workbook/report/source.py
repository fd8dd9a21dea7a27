"""Shows the library's own code in a notebook, so that no cell holds a copy of it."""

import inspect
from typing import Any

from IPython.display import Code


def show_source(*objects: Any) -> Code:
    """The source of functions, classes or modules, highlighted; the writeup leaves it out, as all code."""
    return Code("\n\n".join(inspect.getsource(shown).rstrip() for shown in objects), language="python")
