"""`finetune chat RUN`: talk to the result of a run, or have it answer a file of prompts.

Importing it loads nothing heavy: the options are checked first.
"""

from finetune.chat.command import main as main
