"""Repairs of defects in the installed stack, one file each, in the order in which they are looked at.

EARLY runs before `import unsloth`, LATE after it. A patch is applied only where its probe finds the defect.
"""

from patches import torch_varlen_gqa

EARLY = (torch_varlen_gqa,)
LATE = ()
