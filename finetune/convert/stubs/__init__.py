"""The recording stubs. `trace.py` runs them as a separate program, in a process that cannot open anything.

A notebook's statements, or a converted script, are executed with every library replaced by symbols. A symbol records
how it was made (`load_dataset("x").map(f)`), and calls on it make further symbols, so that two programs can be compared
by what they would train with. Only a few pure modules of the standard library are real.

Containment of a hostile notebook: only names in `guard.PURE_MODULES` are real; attributes that reach the interpreter
(`__subclasses__`, `gi_frame`, ...) are refused before anything runs, also in format strings; an audit hook refuses
files, processes, sockets and everything else that Python reports; steps, time and memory are limited. Beneath all this,
the kernel confines the process (`sandbox.py`), even if the code takes over the interpreter. Uses the standard library
only.

`program` runs the jobs; `instrument` rewrites each statement; `guard` has the builtins and modules that its code gets;
`handlers` the calls that make a training; `symbols` everything else; `state` what they share.
"""

from .program import lock, main
from .state import Unsafe

__all__ = ["Unsafe", "lock", "main"]
